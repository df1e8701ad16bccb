"""Trial of the frameworks on their devices: `gpuwarden doctor --run`."""
