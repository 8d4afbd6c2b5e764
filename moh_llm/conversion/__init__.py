"""A LLaMA checkpoint to a MoH one: read the base, plan the heads, calibrate the router, write, verify."""
