"""gpuwarden: hardware and training runs of one GPU box on one Prometheus endpoint."""
