"""Alert rules for Prometheus, and delivery of alerts by the daemon itself."""
