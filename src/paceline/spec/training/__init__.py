"""What options and records of trainings mean, for the launcher and for the ranks."""
