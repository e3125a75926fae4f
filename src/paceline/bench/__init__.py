"""Measuring jobs, and the arithmetic of what they measured."""
