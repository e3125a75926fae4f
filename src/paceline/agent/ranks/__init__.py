"""Code that runs in a rank's process: fork server, user code, exit, filters and diagnostics."""
