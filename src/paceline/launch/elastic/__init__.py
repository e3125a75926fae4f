"""Decides which hosts and ranks take part in a job, and what follows when some are lost."""
