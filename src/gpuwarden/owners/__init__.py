"""Owners of GPU memory: users, containers, pods, Slurm jobs, runs."""
