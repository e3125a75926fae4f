"""Starts, watches and ends the job's processes on this node."""
