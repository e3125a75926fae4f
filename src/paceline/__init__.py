"""Paceline: a PyTorch training job, on all the machines you have."""

__version__ = "0.1.0"
