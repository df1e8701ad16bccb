"""Client in the training process: standard library only, and the framework that the program has imported."""
