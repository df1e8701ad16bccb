"""The training process's half: standard library only, beside the framework that the run itself has imported."""
