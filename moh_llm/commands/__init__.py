"""One module per command: `add_arguments` declares its flags, and `run` is the job, read from top to bottom."""
