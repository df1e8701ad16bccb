"""Conditions that can be wrong with the box, evaluated against one poll."""
