"""Options and records of trainings that the launcher and the ranks share."""
