"""Nodes that call the launcher: over TLS, with a key that both sides know."""
