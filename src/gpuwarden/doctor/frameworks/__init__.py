"""Checks of a training environment and its frameworks, from their files: no framework is imported."""
