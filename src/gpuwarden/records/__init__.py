"""Run records: what is kept of runs that ended, in SQLite."""
