"""Configuration: schema, value types, loader; the thresholds of conditions, and which of them a rule file can set."""
