"""Meters of one fit: its steps, examples, loss and input wait."""
