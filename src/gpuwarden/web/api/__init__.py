"""JSON documents of the HTTP API."""
