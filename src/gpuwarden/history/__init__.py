"""Recent history: series of the last ten minutes and the hour before, and events."""
