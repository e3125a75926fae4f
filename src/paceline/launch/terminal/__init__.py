"""What the user sees while a job runs."""
