"""Diagnosis of an out-of-memory error: its cause and the next step."""
