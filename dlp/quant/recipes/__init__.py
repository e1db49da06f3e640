"""One file per recipe, named as the user types it; each defines `recipe(**options) -> Recipe`."""
