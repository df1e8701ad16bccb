"""Commands, each in a module that the command line loads when it is called."""
