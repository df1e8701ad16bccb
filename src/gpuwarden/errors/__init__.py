"""Table of problems: the meaning, causes and first step of an error text. Standard library only."""
