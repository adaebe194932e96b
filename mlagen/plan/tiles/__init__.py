"""Tiles: their tables, the files with measured ones, and the checks of what fits a target."""
