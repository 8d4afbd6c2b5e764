"""A LLaMA checkpoint to a MoH one: base (read), plan (which heads), calibrate (the router), checkpoint (write), verify."""
