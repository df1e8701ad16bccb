"""The training side in the daemon: receive what runs report and keep it, bounded, while it counts."""
