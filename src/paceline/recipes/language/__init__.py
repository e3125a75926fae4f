"""Recipes that train causal language models, and their parts."""
