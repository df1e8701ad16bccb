"""Paths of the HTTP API, for the daemon that serves them and the commands that read them."""

STATE = "/api/v1/state"
HISTORY = "/api/v1/history"
RUNS = "/api/v1/runs"
INCIDENTS = "/api/v1/incidents"
