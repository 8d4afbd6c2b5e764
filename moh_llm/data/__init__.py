"""Text to training batches: mixture (what), text (reading), tokenize (ids), stream (order)."""
