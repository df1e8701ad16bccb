"""Second set of metric names, for dashboards and alerts made for NVIDIA's dcgm-exporter; loaded where configured."""
