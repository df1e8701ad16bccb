"""Pure functions and values: no sockets, no files, no clock of their own."""
