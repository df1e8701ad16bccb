"""`gpuwarden top`: the box in a terminal, live. It asks the daemon's API; nothing here is loaded by the daemon."""
