"""Measures this node for plans and checks: facts, GPUs, network, load."""
