"""Alert rules by subject, a row each."""
