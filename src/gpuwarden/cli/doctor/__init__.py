"""Command `gpuwarden doctor`."""
