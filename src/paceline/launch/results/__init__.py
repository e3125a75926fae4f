"""Results of a run: their collection, and the report at its end."""
