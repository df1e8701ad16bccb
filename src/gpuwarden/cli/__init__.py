"""Command line of the daemon and of its clients."""
