"""Descriptions of hosts, in every dialect people have already written them down in.

``read_hosts`` turns a file, a list or the environment into a ``Cluster`` and never changes
what it read; ``apply_overrides`` lays paceline.toml over it; ``write_hosts`` gives it back in
another dialect; ``find_me`` says which of the hosts is this machine. A dialect is one module
in ``dialects`` and one line in ``registry``.
"""

from paceline.hosts.identity import find_me
from paceline.hosts.overrides import apply_overrides
from paceline.hosts.reading import load_toml, read_hosts
from paceline.hosts.registry import DIALECTS
from paceline.hosts.writing import lost_fields, write_hosts

__all__ = [
    "DIALECTS",
    "apply_overrides",
    "find_me",
    "load_toml",
    "lost_fields",
    "read_hosts",
    "write_hosts",
]
