"""Demo: a daemon on simulated GPUs, a real Keras training that runs out of memory, and Prometheus."""
