"""Simulated GPUs and training runs, for machines without a GPU."""
