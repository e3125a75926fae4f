"""The connected nodes of a run: connected, surveyed, and given what they need."""
