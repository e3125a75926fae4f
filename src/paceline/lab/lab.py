"""The lab as an object, for tests and for the command line."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.hosts.lab import Layout, Owner, is_running, list_labs, parent_folder, read_owner
from paceline.lab import available, control, files
from paceline.lab import processes as proc
from paceline.lab.plan import LabOptions, LabPlan, plan_lab
from paceline.spec.errors import LabError

_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 10.0


class Lab:
    """A virtual cluster, from :meth:`up` (or ``with``) to :meth:`down`.

    The hosts end with the calling process, unless the lab is detached.
    """

    def __init__(self, options: LabOptions | None = None) -> None:
        options = options or LabOptions()
        name = options.name or f"{os.getpid()}-{secrets.token_hex(3)}"
        self._options = replace(options, name=name)
        self._plan: LabPlan | None = None
        self._layout: Layout | None = None
        self._lifeline: int | None = None

    @staticmethod
    def available() -> str | None:
        """Why no lab can be made here; None if one can."""
        try:
            available.require()
        except LabError as error:
            return str(error)
        return _output(files.program("available"), subprocess.DEVNULL).strip() or None

    @classmethod
    def attach(cls, name: str) -> Lab:
        """The running lab called ``name``; raises LabError if there is none."""
        layout = Layout(parent_folder() / name)
        if not is_running(layout):
            raise LabError(f"no lab called {name!r} is up", remedy="paceline lab up --hosts 2")
        lab = cls(LabOptions(name=name))
        lab._layout, lab._plan = layout, files.read_plan(layout)
        return lab

    def up(self, detached: bool = False) -> Lab:
        """Brings the lab up.

        Args:
            detached: Keep it until :meth:`down`, even after this process ends.

        Raises:
            LabError: It cannot be made here, or its name is in use.
        """
        available.require()
        plan = plan_lab(self._options, files.surroundings())
        _check_folders(plan)
        self._layout = files.claim(self._options.name)
        self._plan = plan
        try:
            files.write_files(plan, self._layout)
            self._start_owner(detached)
        except BaseException:
            self.down()
            raise
        return self

    def _start_owner(self, detached: bool) -> None:
        command = [*files.program("switch"), str(self.layout.root)]
        if detached:
            output = _output(command, subprocess.DEVNULL)
        else:
            lifeline_read, self._lifeline = os.pipe()
            output = _output([*command, "--held"], lifeline_read)
            os.close(lifeline_read)
        _raise_error(json.loads(output or '{"error": {"message": "the lab could not be started"}}'))

    def down(self) -> None:
        """Takes the lab down and removes everything. Idempotent."""
        if self._layout is None:
            return
        owner = read_owner(self._layout)
        if owner is not None and owner.pid != os.getpid() and owner.is_alive():
            _stop_owner(owner, self._layout)
        files.remove(self._layout)
        if self._lifeline is not None:
            os.close(self._lifeline)
        self._lifeline = self._layout = self._plan = None

    def __enter__(self) -> Lab:
        return self.up()

    def __exit__(self, *_: object) -> None:
        self.down()

    @property
    def name(self) -> str:
        return self._options.name

    @property
    def plan(self) -> LabPlan:
        """Its plan; raises LabError if the lab is down."""
        if self._plan is None:
            raise LabError(f"the lab {self.name!r} is not up")
        return self._plan

    @property
    def layout(self) -> Layout:
        """The paths of its files; raises LabError if the lab is down."""
        if self._layout is None:
            raise LabError(f"the lab {self.name!r} is not up")
        return self._layout

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(host.name for host in self.plan.hosts)

    def address(self, name: str) -> str:
        return self.plan.host(name).address

    @property
    def ssh_config(self) -> Path:
        """The file for ``ssh -F``, for use inside the hosts and outside."""
        return self.layout.ssh_config

    @property
    def hostfile(self) -> Path:
        """Names, one a line."""
        return self.layout.hostfile

    @property
    def settings(self) -> Path | None:
        """Per-host settings (paceline.toml), None if no host differs."""
        file = self.layout.settings
        return file if file.exists() and file.stat().st_size else None

    def home(self, name: str) -> Path:
        """HOME of a host, as seen from outside."""
        return files.home_outside(self.plan, self.layout, self.plan.host(name).name)

    def home_inside(self) -> str:
        """HOME as processes on the hosts see it."""
        return files.home_inside(self.plan)

    def sshd_log(self, name: str) -> Path:
        return self.layout.sshd_log(self.plan.host(name).name)

    def status(self) -> dict[str, Any]:
        """``{"hosts": [{"name", "address", "interface", "up", "sshd", "pid"}], "faults": […]}``.

        Process ids are the machine's; None for a host that is off, or if called on a host.
        """
        status: dict[str, Any] = self._request({"do": "status"})
        first = {p.namespace: p.pid for p in proc.processes_outside() if p.inner == 1}
        for host in status["hosts"]:
            host["pid"] = first.get(host.pop("namespace", 0))
        return status

    def popen(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Starts a command on a host, without ssh, as a child of this process.

        Args:
            env: Variables in addition to those of a login.
            cwd: Folder on the host. Default: this process's own if the host has it, else HOME.
            options: Passed to subprocess.Popen.
        """
        command = self.command(name, argv, cwd=cwd)
        return subprocess.Popen(command, env={**self.environment(name), **(env or {})}, **options)

    def environment(self, name: str) -> dict[str, str]:
        """The variables of a login on a host, with its Python environment first on PATH."""
        return files.environment(self.plan, self.plan.host(name))

    def command(
        self, name: str, argv: Sequence[str | Path], cwd: str | Path | None = None
    ) -> list[str]:
        """The command line that runs ``argv`` on a host, in its caller's environment."""
        self.plan.host(name)
        folder = str(cwd or Path.cwd())
        arguments = [str(word) for word in argv]
        return [*files.program("run"), str(self.layout.root), name, folder, *arguments]

    def exec(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        input: str | None = None,
        check: bool = False,
        cwd: str | Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on a host, waits for it, and returns its output.

        Raises:
            subprocess.TimeoutExpired: It was killed after ``timeout`` seconds.
            subprocess.CalledProcessError: It failed and ``check`` was set.
        """
        command = self.command(name, argv, cwd=cwd)
        return subprocess.run(command, env={**self.environment(name), **(env or {})},
                              input=input or "", capture_output=True, text=True,
                              timeout=timeout, check=check)  # fmt: skip

    def processes(self, name: str) -> list[tuple[int, str]]:
        """Process ids and command lines on a host, except its first process and sshd's listener."""
        return self._started(name, self._processes_on(name))

    def listeners(self, name: str) -> list[str]:
        """Listening TCP sockets on a host as ``address:port``, except sshd's."""
        return _listeners(self._processes_on(name))

    def activity(self) -> dict[str, tuple[list[tuple[int, str]], list[str]]]:
        """``processes`` and ``listeners`` of each host that is up, by its name, read at once."""
        status: dict[str, Any] = self._request({"do": "status"})
        everyone = proc.processes_outside()
        found: dict[str, tuple[list[tuple[int, str]], list[str]]] = {}
        for host in status["hosts"]:
            if host["up"] and (own := proc.of_host(everyone, host["namespace"])):
                found[host["name"]] = self._started(host["name"], own), _listeners(own)
        return found

    def _started(self, name: str, processes: list[proc.Process]) -> list[tuple[int, str]]:
        sshd_config = str(self.layout.sshd_config(name))
        return [
            (process.pid, process.command)
            for process in processes
            if process.inner != 1
            and not (process.command.startswith("sshd:") and sshd_config in process.command)
        ]

    def _processes_on(self, name: str) -> list[proc.Process]:
        reply, fds = self._request_with_fds({"do": "enter", "host": name})
        _raise_error(reply)
        try:
            inode = os.fstat(fds[control.NAMESPACES.index("pid")]).st_ino
        finally:
            for fd in fds:
                os.close(fd)
        return proc.of_host(proc.processes_outside(inode), inode)

    def fault(self, kind: str, name: str, *arguments: str | int) -> None:
        """Applies a fault to a host; raises LabError if that is not possible."""
        self._request(_fault_request("fault", kind, name, arguments))

    def undo(self, kind: str, name: str, *arguments: str | int) -> None:
        """Undoes a fault; raises LabError if it is not active."""
        self._request(_fault_request("undo", kind, name, arguments))

    def heal(self, name: str | None = None) -> None:
        """Undoes every fault of a host, or of all hosts; starts those, and sshds, that are off."""
        self._request({"do": "heal", "host": name})

    def _request(self, request: dict[str, Any]) -> Any:
        reply, _ = self._request_with_fds(request)
        _raise_error(reply)
        return reply

    def _request_with_fds(self, request: dict[str, Any]) -> tuple[Any, list[int]]:
        try:
            return control.send_request(str(self.layout.control), request)
        except control.GoneError:
            raise LabError(
                f"the lab {self.name!r} has died", remedy="paceline lab down, then up again"
            ) from None


def _fault_request(
    verb: str, kind: str, name: str, arguments: Sequence[str | int]
) -> dict[str, Any]:
    texts = [str(argument) for argument in arguments]
    return {"do": verb, "kind": kind, "host": name, "arguments": texts}


def _output(command: list[str], stdin: int) -> str:
    # a minimal environment, because every host can read it in /proc/1/environ
    inherited = {k: os.environ[k] for k in ("LD_LIBRARY_PATH", "LANG") if k in os.environ}
    environment = {"PATH": files.USUAL_PATH, **inherited}
    result = subprocess.run(command, stdin=stdin, stdout=subprocess.PIPE, text=True,
                            timeout=_START_TIMEOUT_S, env=environment, start_new_session=True,
                            check=False)  # fmt: skip
    return result.stdout


def _listeners(processes: list[proc.Process]) -> list[str]:
    """Listening TCP sockets of a host except sshd's, read from its first process."""
    first = next(process.pid for process in processes if process.inner == 1)
    addresses = proc.listeners(first)
    return [address for address in addresses if address not in ("0.0.0.0:22", "[::]:22")]


def _raise_error(reply: Any) -> None:
    if isinstance(reply, dict) and "error" in reply:
        raise LabError(**reply["error"])


def _check_folders(plan: LabPlan) -> None:
    for path in (*(folder.path for folder in plan.private), *plan.options.hide):
        if not Path(path).is_absolute():
            raise LabError(f"{path} is not absolute", remedy=f"give {Path(path).absolute()}")
        if not Path(path).is_dir():
            raise LabError(f"{path} is not a folder here", remedy=f"mkdir -p {shlex.quote(path)}")


def _stop_owner(owner: Owner, layout: Layout) -> None:
    try:
        handle = os.pidfd_open(owner.pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(control.GoneError, OSError):
            control.send_request(str(layout.control), {"do": "down"}, timeout=_END_TIMEOUT_S)
        if not select.select([handle], [], [], _END_TIMEOUT_S)[0] and owner.is_alive():
            os.kill(owner.pid, 9)
            if not select.select([handle], [], [], _END_TIMEOUT_S)[0]:
                raise LabError(
                    f"the lab {layout.root.name!r} does not end",
                    found=f"process {owner.pid} is there {_END_TIMEOUT_S:.0f} s after kill -9",
                    remedy=f"paceline lab down --name {layout.root.name}",
                )
    finally:
        os.close(handle)


def names_up() -> list[str]:
    return [layout.root.name for layout in list_labs() if is_running(layout)]


def wait(lab: Lab) -> None:
    while is_running(lab.layout):
        time.sleep(0.2)
