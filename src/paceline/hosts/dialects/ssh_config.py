"""An OpenSSH client configuration: every alias that is a name and no pattern.

Only names are read. OpenSSH itself applies the file's user, port, key and ``Match`` blocks when it
connects to the alias.
"""

from __future__ import annotations

import re
import shlex

from paceline.hosts.address import check_address
from paceline.hosts.dialect import Dialect, Parsed, Reading, UnreadableError, line_error
from paceline.hosts.lines import split_lines
from paceline.spec.hosts import Cluster, Host

_KEYWORD = re.compile(r"\s*([A-Za-z]+)(?:\s*=\s*|\s+)(.*)")
_HOST_LINE = re.compile(r"^[ \t]*host[ \t=]+\S", re.I | re.M)
_OPTION_LINE = re.compile(
    r"^[ \t]*(hostname|user|port|identityfile|proxyjump)[ \t=]+\S", re.I | re.M
)


def detect(reading: Reading) -> bool:
    """Whether there are ``Host`` lines together with a common option."""
    return bool(_HOST_LINE.search(reading.text) and _OPTION_LINE.search(reading.text))


def parse(reading: Reading) -> Parsed:
    """Returns the aliases in the order of the file, each once."""
    names: dict[str, Host] = {}
    for number, line in enumerate(split_lines(reading.text), start=1):
        for alias in _aliases(reading.label, number, line):
            names.setdefault(alias, Host(alias))
    note = f"aliases of {reading.label}: OpenSSH reads user, port and key there itself"
    return Parsed(tuple(names.values()), (note,))


def write(cluster: Cluster) -> str:
    """Writes a ``Host`` block for each host."""
    return "\n".join(_block(host) for host in cluster.hosts)


def keyword(line: str) -> tuple[str, str]:
    """Returns keyword in lower case and arguments of a line; empty for blanks and comments."""
    match = _KEYWORD.fullmatch(line.strip())
    return (match[1].lower(), match[2]) if match else ("", "")


def _aliases(label: str, number: int, line: str) -> list[str]:
    key, arguments = keyword(line)
    if key != "host":
        return []
    try:
        names = shlex.split(arguments, comments=True)
        return [check_address(name) for name in names if not set(name) & set("*?!")]
    except UnreadableError as problem:
        raise line_error(label, number, line, problem.expected) from None
    except ValueError:
        raise line_error(label, number, line, "quotes that are closed") from None


def _block(host: Host) -> str:
    options = {
        "HostName": host.address if host.address != host.name else None,
        "User": host.user,
        "Port": host.port,
        "IdentityFile": _quoted(host.identity_file),
    }
    lines = [f"    {key} {value}\n" for key, value in options.items() if value is not None]
    return f"Host {host.name}\n" + "".join(lines)


def _quoted(path: str | None) -> str | None:
    return f'"{path}"' if path and re.search(r"\s", path) else path


DIALECT = Dialect(
    name="ssh-config",
    title="OpenSSH client configuration",
    detect=detect,
    parse=parse,
    write=write,
    preserved_fields=frozenset({"name"}),  # the rest is OpenSSH's to read
    written_fields=frozenset({"name", "address", "user", "port", "identity_file"}),
)
