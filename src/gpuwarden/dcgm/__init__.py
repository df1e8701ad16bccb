"""The page's second set of names, for dashboards and alerts made for NVIDIA's dcgm-exporter; loaded where wanted."""
