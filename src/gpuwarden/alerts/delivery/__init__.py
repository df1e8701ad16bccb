"""Delivery of the daemon's own alerts to Alertmanagers, webhooks and apprise services.

`dispatcher` evaluates the alert conditions once a poll and hands the result to one `sender` a target. A sender has a
`queue`, which decides what is due, and a thread that sends it. Loaded only where the configuration names a target.
"""
