"""The status page: files for browsers, which build it there on `/api/v1/state` and `/api/v1/history`."""
