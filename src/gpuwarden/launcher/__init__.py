"""Command `gpuwarden run`: runs a program with its training watched, and reports what it did and how it ended."""
