"""Recipes: the tables of a TOML file, and the code that they name."""
