"""Detached runs: their files on the supervisor's host, and the file that leads back to it.

On the supervisor's host a run has a folder, ``~/.cache/paceline/detached/RUN_ID``, that only its
user can read. It exists until the results are fetched::

    about.json    describes the run: :class:`DetachedRecord`
    run/          the run directory, as with an attached launcher; run/screen.txt is the screen
    control/      paceline, as installed where the run was started; removed with the supervisor
    code/, input0/ …  folders of the launching machine for the hosts; removed likewise

On the launching machine the run directory holds ``detached.json`` (:class:`SupervisorLocation`).
If the supervisor runs on the launching machine itself, ``run/`` is that run directory: there is no
``detached.json``, and the folder with ``about.json`` is removed with the supervisor.
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

RECORD_FILE = "about.json"  # in the run's folder on the supervisor's host
RUN_FOLDER = "run"  # the run directory in such a folder
RETENTION_S = 7 * 24 * 3600.0  # default time for which unfetched results are kept

_RUN_ID = re.compile("[0-9a-f]{6,64}")


@dataclass(frozen=True, slots=True)
class DetachedRecord:
    """The content of ``about.json``.

    Attributes:
        run_id: Id of the run and name of its folder.
        name: The user's name for the run.
        command: The command line, the program's name first.
        hosts: Names of its hosts, in rank order.
        started: When it was detached, in seconds since 1970.
        launched_by: Who started it, as ``user@machine``.
        launched_in: Absolute path of the run directory on the launching machine.
        supervisor_host: Host name of this machine.
        pid: Process id of the supervisor.
        pid_start: Start time of that process, in this machine's own unit.
        run: Absolute path of the run directory on this machine.
        keep_s: How long unfetched results are kept after the end, in seconds.
        ended: When it ended, in seconds since 1970; ``None`` while it runs.
        exit_code: Exit status of the run; ``None`` while it runs.
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
    keep_s: float = RETENTION_S
    ended: float | None = None
    exit_code: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> DetachedRecord | None:
        """Builds it from a file's content; ``None`` if that describes no run."""
        run_id, pid = record.get("run_id"), record.get("pid")
        if not is_run_id(run_id) or not _is_integer(pid) or not _text(record.get("run")):
            return None
        ended, code = record.get("ended"), record.get("exit_code")
        texts = ("name", "launched_by", "launched_in", "supervisor_host", "run")
        return cls(
            run_id=str(run_id),
            command=_text_tuple(record.get("command")),
            hosts=_text_tuple(record.get("hosts")),
            started=_number(record.get("started")),
            pid=int(str(pid)),
            pid_start=_number(record.get("pid_start")),
            keep_s=_number(record.get("keep_s", RETENTION_S)),
            ended=None if ended is None else _number(ended),
            exit_code=code if _is_integer(code) else None,
            **{key: _text(record.get(key)) for key in texts},
        )


@dataclass(frozen=True, slots=True)
class SupervisorLocation:
    """The content of ``detached.json``: where a detached run continues. Holds no secret.

    Attributes:
        host: The user's name for the supervisor's host.
        address: What SSH connects to.
        folder: The run's folder there.
        since: When it was detached, in seconds since 1970.
        user, port, identity_file: As in :class:`paceline.spec.hosts.Host`.
        python: Interpreter for an agent there.
        ssh_config: ssh config file; ``None`` for the user's own.
        project: The project on this machine; ``None`` on one that did not start the run.
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
    project: str | None = None

    def to_host(self) -> Host:
        """The supervisor's host, for a login."""
        return Host(self.host, self.address, user=self.user, port=self.port,
                    identity_file=self.identity_file, python=self.python)  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The content of ``detached.json``; ssh's settings are in a table of their own."""
        flat = asdict(self)
        if self.project is None:  # a location that has none keeps its seal
            del flat["project"]
        ssh = {"config": flat.pop("ssh_config"), "identity_file": flat.pop("identity_file")}
        return {**flat, "ssh": ssh}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> SupervisorLocation | None:
        """Builds it from a file's content; ``None`` if that names no run on a host."""
        ssh = record.get("ssh")
        ssh = ssh if isinstance(ssh, dict) else {}
        run_id, port = record.get("run_id"), record.get("port")
        host, folder = _text(record.get("host")), _text(record.get("folder"))
        if not is_run_id(run_id) or not host or not folder.startswith("/"):
            return None
        return cls(
            run_id=str(run_id),
            host=host,
            address=_text(record.get("address")) or host,
            folder=folder,
            since=_number(record.get("since")),
            user=_text(record.get("user")) or None,
            port=port if _is_integer(port) else None,
            identity_file=_text(ssh.get("identity_file")) or None,
            python=_text(record.get("python")) or "python3",
            ssh_config=_text(ssh.get("config")) or None,
            project=_text(record.get("project")) or None,
        )


def is_run_id(value: Any) -> bool:
    """Whether a value has the form of a run's id, which is safe in a path."""
    return isinstance(value, str) and bool(_RUN_ID.fullmatch(value))


def _text(value: Any) -> str:
    return value[:4096] if isinstance(value, str) else ""


def _text_tuple(value: Any) -> tuple[str, ...]:
    items = value if isinstance(value, list) else []
    return tuple(item[:4096] for item in items[:4096] if isinstance(item, str))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _number(value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1 << 63 and math.isfinite(value) else 0.0
