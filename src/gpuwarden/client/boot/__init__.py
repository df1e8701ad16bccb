"""Instrumentation of a program under `gpuwarden run`: count steps and keep errors, with no line of code changed."""
