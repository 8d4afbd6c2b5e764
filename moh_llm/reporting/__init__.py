"""Curves and tables of training runs: reading their folders, grouping by recipe, pictures, the page."""
