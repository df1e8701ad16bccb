"""The demonstration: a daemon on simulated GPUs, a real Keras training that climbs to its memory limit, Prometheus."""
