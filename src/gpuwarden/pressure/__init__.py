"""Pressure levels of GPUs and of the runs on them."""
