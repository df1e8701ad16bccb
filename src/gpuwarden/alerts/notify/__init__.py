"""Telling people of alerts without Prometheus and Alertmanager: by webhook, Slack, mail, or through apprise.

The event loop hands what fires to a channel for each target, which has a thread of its own: `sink`, `channel`. What is
to be told and what has been is in its `book`; what is said, in `message`. Loaded only where `notify` names a target.
"""
