"""Preparing hosts: keys, pinned host keys, ssh config, worker sshd, environments.

``access`` looks, decides, does and looks again; every change goes into the ``journal`` first, so
that it can be undone exactly. ``lines`` only says what could be typed.
"""
