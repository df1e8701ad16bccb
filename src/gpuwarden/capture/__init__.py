"""Recording of a driver's answers, and their replay without a GPU."""
