"""Reads and writes descriptions of hosts, in the formats of other programs (dialects).

``read_hosts`` reads a file, a list or the environment into a ``Cluster``; ``apply_overrides``
applies paceline.toml; ``write_hosts`` writes another dialect; ``find_local_host`` returns the host
that is this machine. To add a dialect, write a module in ``dialects`` and add one line to its
``__init__``.
"""

from paceline.hosts.dialects import DIALECTS, lost_fields, write_hosts
from paceline.hosts.files import check_keys
from paceline.hosts.identity import find_local_host
from paceline.hosts.source import load_toml, read_hosts
from paceline.hosts.tables import apply_overrides

__all__ = [
    "DIALECTS",
    "apply_overrides",
    "check_keys",
    "find_local_host",
    "load_toml",
    "lost_fields",
    "read_hosts",
    "write_hosts",
]
