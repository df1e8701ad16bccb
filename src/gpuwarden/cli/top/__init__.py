"""Terminal view of GPUs and runs: `gpuwarden top`."""
