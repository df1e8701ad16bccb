"""Batch size search, and retry with a smaller batch after an out-of-memory error."""
