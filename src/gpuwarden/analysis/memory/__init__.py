"""Memory of a run over time: headroom, leaks, OOM forecast."""
