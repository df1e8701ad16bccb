"""What was so in the last minutes: small and bounded, for people who look now. Prometheus keeps the past."""
