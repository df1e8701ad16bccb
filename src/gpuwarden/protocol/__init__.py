"""Messages between runs and the daemon. Standard library only."""
