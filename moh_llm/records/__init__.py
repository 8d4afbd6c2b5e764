"""The typed records that each step writes and the next one reads."""
