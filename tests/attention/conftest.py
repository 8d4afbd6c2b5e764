"""Pairs of models."""

from pairs import make_pair  # noqa: F401
