"""Command `gpuwarden fleet`: configuration of an engine that monitors many hosts."""
