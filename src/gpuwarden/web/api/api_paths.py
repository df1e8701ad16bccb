"""Paths of the HTTP API and of the pages of runs and incidents, for the daemon that serves them and the commands that use them."""

STATE = "/api/v1/state"
HISTORY = "/api/v1/history"
RUNS = "/api/v1/runs"
INCIDENTS = "/api/v1/incidents"
ALERT_PAGE = "/alerts"  # the list, and below it the page of each by its name
RUN_PAGE = "/run/"  # and the run's id
INCIDENT_PAGE = "/incident/"  # and the incident's id
