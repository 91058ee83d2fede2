"""Client for threads."""
