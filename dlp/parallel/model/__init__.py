"""What is done to a whole model: conversion, the step boundary, swaps, checks."""
