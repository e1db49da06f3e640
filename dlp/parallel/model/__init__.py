"""Operations on a whole model: conversion, the step boundary, recipe changes, checks."""
