"""Reports for people: tables, matrices, one line of conclusion."""
