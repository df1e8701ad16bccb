"""The parts of one fit: the functions that Keras calls, and meters of its steps, examples, loss and input wait."""
