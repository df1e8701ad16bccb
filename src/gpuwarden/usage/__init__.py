"""GPU usage of runs: hours, energy, throttled time."""
