"""Table of all checks, and their execution."""
