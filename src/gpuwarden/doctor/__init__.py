"""Doctor: checks of the machine and of a training environment, without a daemon and without importing a framework."""
