"""What programs ask the daemon for beside its page: the box at the last poll, and its last ten minutes."""
