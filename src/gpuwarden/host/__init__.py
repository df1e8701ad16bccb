"""The machine beneath the GPUs: /proc, cgroups, kernel log."""
