"""What people look at: tables, matrices, one line of conclusion."""
