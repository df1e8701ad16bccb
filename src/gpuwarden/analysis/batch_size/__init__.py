"""Largest batch size that fits, from the memory peaks of earlier sizes."""
