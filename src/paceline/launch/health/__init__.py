"""Watches over running ranks: hangs, blocked links between hosts, ranks that work alone."""
