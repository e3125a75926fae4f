"""The ssh of mpiexec: hands the key of the run to the remote command, on standard input.

mpiexec must not know the key: whoever connects to its port is sent the environment that it passes
on. Run by path and without the rest of Paceline: ``python mpi_ssh.py KEY_FILE VARIABLE ARGUMENTS``.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

_WITH_VALUE = ("-F", "-i", "-l", "-o", "-p")  # options of ssh that a word of their own follows
# the login shell runs the command, as it would without us
_READ_KEY = 'IFS= read -r {0}; export {0}; exec "${{SHELL:-/bin/sh}}" -c "$1"'


def with_key(arguments: Sequence[str], variable: str) -> list[str]:
    """Returns arguments for ssh, whose remote command first reads ``variable`` from its input.

    The remote command may be of several words, which ssh joins; any login shell understands it.
    """
    place = 0
    while arguments[place].startswith("-"):
        place += 2 if arguments[place] in _WITH_VALUE else 1
    command = " ".join(arguments[place + 1 :])
    remote = ["/bin/sh", "-c", _READ_KEY.format(variable), "sh", command]
    return [*arguments[: place + 1], f"exec {shlex.join(remote)}"]


def main(key_file: str, variable: str, *arguments: str) -> None:
    """Becomes ssh; without a key file, as it is."""
    if os.path.exists(key_file):  # noqa: PTH110 - imports little
        os.dup2(os.open(key_file, os.O_RDONLY), 0)
        arguments = tuple(with_key(arguments, variable))
    os.execvp("ssh", ["ssh", *arguments])  # noqa: S606


if __name__ == "__main__":
    main(*sys.argv[1:])
