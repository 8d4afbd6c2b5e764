"""The whole path on one small real model, with no download but from a package registry."""
