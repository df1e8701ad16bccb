"""Flight recorder: incidents, each with the ten minutes before it, and a finding in plain words."""
