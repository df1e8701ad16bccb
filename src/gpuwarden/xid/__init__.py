"""XID errors: codes, their sources, each fault counted once."""
