"""How each reading of a GPU is taken, by subject; gpu/metrics.py names them."""
