"""Simulated box: GPUs and runs for machines without a GPU."""
