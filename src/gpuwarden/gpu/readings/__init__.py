"""How each reading of a GPU is taken, by subject; gpu/table.py names them."""
