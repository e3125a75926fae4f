"""Preparing machines: keys, pinned host keys, ssh config, worker sshd, environments.

Everything is decided first (``plan``), shown, then done (``doing``), and written down in a journal
so that it can be undone exactly (``journal``).
"""
