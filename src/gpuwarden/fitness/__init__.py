"""Fitness of the node and its GPUs for a job: the table of checks, and their assessment."""
