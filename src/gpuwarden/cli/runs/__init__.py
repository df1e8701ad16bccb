"""Command `gpuwarden runs`: lists of training runs and reports of one."""
