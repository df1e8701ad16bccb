"""Recent history: series of the last hour, the last ten minutes of it at full resolution, and events."""
