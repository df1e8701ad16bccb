"""Errors of the training process: classified exceptions, and losses that are not finite."""
