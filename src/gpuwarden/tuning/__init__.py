"""Training that fits the memory: batch size search, retry after an out-of-memory error."""
