"""Notifications without Prometheus and Alertmanager: by webhook, or by mail, Slack and others through apprise.

The event loop hands what fires to a channel for each target, which has a thread of its own: `sink`, `channel`. What is
to be told and what has been is in its `book`; what is said, in `message`. Loaded only where `notify` names a target.
"""
