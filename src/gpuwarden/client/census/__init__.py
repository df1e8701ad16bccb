"""Census of tensors: which are alive, and which name of the program keeps them."""
