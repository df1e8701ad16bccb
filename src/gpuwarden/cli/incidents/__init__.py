"""Command `gpuwarden incidents`: lists of incidents, and reports of one or of several hosts."""
