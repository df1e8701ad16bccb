"""Metric tables and their exposition in the text formats of Prometheus."""
