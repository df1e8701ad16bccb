"""Page of an incident, and what it shares with the report for a terminal."""
