"""The run directory: its only writer, its readers, and its owner."""
