"""Host of the GPUs: /proc, cgroups, kernel log."""
