"""HTTP server, status page and JSON API."""
