"""Page of incidents, and what it has in common with their report for a terminal."""
