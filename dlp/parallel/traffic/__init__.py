"""Bytes that a step sends: predicted from a plan, and counted."""
