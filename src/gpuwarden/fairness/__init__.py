"""Fairness between users: rates, evictions and log lines that one user cannot use up for all."""
