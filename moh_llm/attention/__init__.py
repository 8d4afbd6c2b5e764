"""Backends of `interval_attention`."""
