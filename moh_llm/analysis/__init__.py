"""What the heads of a MoH model do on text, as the figures of the paper have it."""
