"""Recording of what a driver answers, and its replay without a GPU."""
