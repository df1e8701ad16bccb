"""Command `gpuwarden debug-bundle`: a masked archive of the daemon's state for a bug report."""
