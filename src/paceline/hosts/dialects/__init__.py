"""The dialects, one module each; ``registry.py`` knows them by name."""
