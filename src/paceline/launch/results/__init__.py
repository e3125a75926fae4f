"""What a run leaves in its run directory, and the last words about it."""
