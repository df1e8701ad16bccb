"""Classification of exceptions of the training process."""
