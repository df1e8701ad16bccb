"""Readers of each metric of a GPU, by subject; gpu/metrics.py names them."""
