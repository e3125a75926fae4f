"""What a rank's process runs: fork server, user code, exit, filters and diagnostics."""
