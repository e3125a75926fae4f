"""Runs that nobody watches: what lies on the supervisor's host, and what leads back to it.

On the supervisor's host a run has a folder of its own, ``~/.cache/paceline/detached/RUN_ID``, for
its user alone. While it runs, and until its results were fetched::

    about.json    what this is: :class:`About`
    run/          the run directory, as an attached launcher keeps it; run/screen.txt is the screen
    control/      paceline itself, as it was where the run was started; goes with the supervisor
    code/, input0/ …  folders of the launching machine that the hosts are sent; the same

On the launching machine the run's folder holds ``detached.json`` (:class:`Detached`): whom to ask.
Where the supervisor runs on the launching machine itself, the run directory is the run's folder:
there is no ``detached.json``, and the folder with ``about.json`` goes with the supervisor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline.spec.hosts import Host
from paceline.spec.rundir import DETACHED as DETACHED
from paceline.spec.rundir import SCREEN as SCREEN

ABOUT = "about.json"  # in the run's folder on the supervisor's host
FOLDERS = "detached"  # of such folders, below the cache of paceline
RUN = "run"  # in it: the run directory
KEPT_S = 7 * 24 * 3600.0  # results that nobody fetches stay for so long by default, in seconds

_RUN_ID = re.compile("[0-9a-f]{6,64}")


@dataclass(frozen=True, slots=True)
class About:
    """A detached run, as its folder on the supervisor's host tells of it.

    Attributes:
        run_id: Names the run; its folder has this name, too.
        name: What its user calls it.
        command: The words that were typed, the program's name first.
        hosts: Names of its hosts, in rank order.
        started: When it was left, in seconds since 1970.
        launched_by: Who started it, as ``user@machine``.
        launched_in: The run's folder there, absolute.
        supervisor_host: Name of this machine by its own word.
        pid: Process id of the supervisor.
        pid_start: When that process began, by this machine's own measure.
        run: Absolute path of the run directory on this machine.
        keep_s: How long it stays there after the end when nobody fetches it, in seconds.
        ended: When it ended, in seconds since 1970; ``None`` while it runs.
        exit_code: How; ``None`` while it runs.
    """

    run_id: str
    name: str
    command: tuple[str, ...]
    hosts: tuple[str, ...]
    started: float
    launched_by: str
    launched_in: str
    supervisor_host: str
    pid: int
    pid_start: float
    run: str
    keep_s: float = KEPT_S
    ended: float | None = None
    exit_code: int | None = None

    def to_json(self) -> dict[str, Any]:
        """As ``about.json`` holds it."""
        return asdict(self)

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> About | None:
        """From what a file holds; ``None`` for what tells of no run."""
        run_id, pid = said.get("run_id"), said.get("pid")
        if not is_run_id(run_id) or not _whole(pid) or not _text(said.get("run")):
            return None
        ended, code = said.get("ended"), said.get("exit_code")
        return cls(
            run_id=str(run_id),
            name=_text(said.get("name")),
            command=_texts(said.get("command")),
            hosts=_texts(said.get("hosts")),
            started=_number(said.get("started")),
            launched_by=_text(said.get("launched_by")),
            launched_in=_text(said.get("launched_in")),
            supervisor_host=_text(said.get("supervisor_host")),
            pid=int(str(pid)),
            pid_start=_number(said.get("pid_start")),
            run=_text(said.get("run")),
            keep_s=_number(said.get("keep_s", KEPT_S)),
            ended=None if ended is None else _number(ended),
            exit_code=code if _whole(code) else None,
        )


@dataclass(frozen=True, slots=True)
class Detached:
    """Where a run that was left goes on; no secret.

    Attributes:
        run_id: Names the run.
        host: What its user calls the supervisor's host.
        address: What SSH connects to.
        folder: The run's folder there.
        since: When it was left, in seconds since 1970.
        user, port, identity_file: As of :class:`paceline.spec.hosts.Host`.
        python: Interpreter for an agent there.
        ssh_config: ssh config file that was named; ``None`` for the user's own.
    """

    run_id: str
    host: str
    address: str
    folder: str
    since: float
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    python: str = "python3"
    ssh_config: str | None = None

    def to_host(self) -> Host:
        """The supervisor's host, to be logged in to."""
        return Host(self.host, self.address, user=self.user, port=self.port,
                    identity_file=self.identity_file, python=self.python)  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """As ``detached.json`` holds it: how it was logged in stands in a table of its own."""
        flat = asdict(self)
        ssh = {"config": flat.pop("ssh_config"), "identity_file": flat.pop("identity_file")}
        return {**flat, "ssh": ssh}

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Detached | None:
        """From what a file holds; ``None`` for what leads nowhere."""
        ssh = said.get("ssh")
        ssh = ssh if isinstance(ssh, dict) else {}
        run_id, port = said.get("run_id"), said.get("port")
        host, folder = _text(said.get("host")), _text(said.get("folder"))
        if not is_run_id(run_id) or not host or not folder.startswith("/"):
            return None
        return cls(
            run_id=str(run_id),
            host=host,
            address=_text(said.get("address")) or host,
            folder=folder,
            since=_number(said.get("since")),
            user=_text(said.get("user")) or None,
            port=port if _whole(port) else None,
            identity_file=_text(ssh.get("identity_file")) or None,
            python=_text(said.get("python")) or "python3",
            ssh_config=_text(ssh.get("config")) or None,
        )


def is_run_id(value: Any) -> bool:
    """Whether a value has the form of a run's name, which is good for a path."""
    return isinstance(value, str) and bool(_RUN_ID.fullmatch(value))


def _text(value: Any) -> str:
    return value[:4096] if isinstance(value, str) else ""


def _texts(value: Any) -> tuple[str, ...]:
    given = value if isinstance(value, list) else []
    return tuple(one[:4096] for one in given[:4096] if isinstance(one, str))


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _number(value: Any) -> float:
    usable = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if usable and abs(value) < 1 << 63 and math.isfinite(value) else 0.0
