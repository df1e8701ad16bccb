"""Command `gpuwarden incidents`: the list of incidents, and the report of one."""
