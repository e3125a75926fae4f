"""Runs of this machine and of hosts: lookup, state, and clients of their launchers."""
