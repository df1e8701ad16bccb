"""The training process's half: standard library only, and the framework that the run itself has imported."""
