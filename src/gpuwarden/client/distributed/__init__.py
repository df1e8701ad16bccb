"""Jobs of several processes: this process's place, and decisions of all workers together."""
