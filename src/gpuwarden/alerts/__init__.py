"""Alerts: the rules for Prometheus as tables, and what the daemon tells people by itself."""
