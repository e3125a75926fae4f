"""Descriptions of hosts, in every dialect people have already written them down in.

``read_hosts`` turns a file, a list or the environment into a ``Cluster`` and never changes
what it read; ``apply_overrides`` lays paceline.toml over it; ``write_hosts`` gives it back in
another dialect; ``find_me`` says which of the hosts is this machine. A dialect is one module
in ``dialects`` and one line in its ``__init__``.
"""

from paceline.hosts.dialects import DIALECTS, lost_fields, write_hosts
from paceline.hosts.identity import find_me
from paceline.hosts.source import load_toml, read_hosts
from paceline.hosts.tables import apply_overrides

__all__ = [
    "DIALECTS",
    "apply_overrides",
    "find_me",
    "load_toml",
    "lost_fields",
    "read_hosts",
    "write_hosts",
]
