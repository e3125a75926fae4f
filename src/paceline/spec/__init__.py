"""The nouns: frozen values without I/O. Everything depends on them, they on nothing."""
