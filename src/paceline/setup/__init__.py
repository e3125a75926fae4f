"""Preparing hosts: keys, pinned host keys, ssh config, worker sshd, environments.

``access`` checks logins and installs keys; every change is first recorded in the ``journal``, so
that it can be undone exactly. ``lines`` only renders lines and commands for people.
"""
