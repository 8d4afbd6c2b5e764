"""Scoring: frozen benchmark suites, run with lm-eval on the base and the MoH model, and the report."""
