"""One module per command: its flags, and the job read from top to bottom."""
