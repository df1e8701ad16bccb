"""The last ten minutes, for the status page and the API."""
