"""The run directory: its only writer, its readers, and who runs in it."""
