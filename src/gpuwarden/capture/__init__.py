"""Recording of a driver's answers, and their replay without a GPU: of captures, and of the simulated GPUs."""
