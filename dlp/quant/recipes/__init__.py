"""Recipes, one file per recipe with the name of the recipe; each file defines `recipe(**options) -> Recipe`."""
