"""Recipes of dlp. The file NAME.py defines the recipe NAME by a function `recipe(**options) -> Recipe`."""
