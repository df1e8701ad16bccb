"""Configuration: schema, value types, loader."""
