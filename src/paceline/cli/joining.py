"""A node other than the first, when the command is typed on each: it calls, serves, and waits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.agent import caller
from paceline.rendezvous.callback import caller_command, caller_config
from paceline.rendezvous.hand import Meeting, addresses_of, command_hash
from paceline.schedulers.mpi import STRIP
from paceline.spec.errors import ConnectError
from paceline.spec.job import Job

GOODBYE_S = 10.0


def join(where: Meeting, job: Job) -> int:
    """Serves the first node until the job is over; its exit status is the job's."""
    about = about_me(where, job)
    addresses = [(address, where.port) for address in addresses_of(where.host)]
    with _call(where, addresses, about) as status:
        agent = _start_agent(where, addresses, about)
        try:
            return _wait(status, agent)
        finally:
            _end(agent)


def about_me(where: Meeting, job: Job) -> dict[str, Any]:
    """What the first node has to know of this one."""
    here = Path.cwd()
    return {
        "rendezvous": where.name,
        "place": where.place,
        "nodes": where.nodes,
        "command": command_hash(where.key, job),
        "python": job.python,
        "workdir": str(here),
    }


@contextlib.contextmanager
def _call(where: Meeting, addresses: list[tuple[str, int]],
          about: dict[str, Any]) -> Iterator[socket.socket]:  # fmt: skip
    """The connection by which we hear how the job ends; waits for the first node."""
    mine = {**about, "stream": "status", "name": socket.gethostname()}
    deadline = time.monotonic() + where.patience_s
    try:
        connection = caller.dial(list(addresses), where.key, mine, deadline)
    except (OSError, caller.Refused) as error:
        raise not_met(where, str(error)) from None
    with connection:
        yield connection


def not_met(where: Meeting, why: str) -> ConnectError:
    """The error for a first node that does not answer, or does not want us."""
    remedy = "Type the same command there, with --node-rank 0"
    if "another key" in why:
        remedy = "Type the key that the first node shows, or give both the same key file"
    if "--rdzv-id" in why:
        remedy = "Give the same --rdzv-id on each node"
    if "another script" in why:
        remedy = "Type the very same command on each node"
    return ConnectError(
        f"this node did not meet the first node at {where.host}:{where.port}",
        found=why or f"{where.host} is no name that this machine knows",
        remedy=remedy,
    )


def _start_agent(where: Meeting, addresses: list[tuple[str, int]],
                 about: dict[str, Any]) -> subprocess.Popen[bytes]:  # fmt: skip
    config = caller_config(addresses, [about["python"]], [], STRIP, 30.0, about)
    return subprocess.Popen(
        caller_command(config),
        env={**os.environ, caller.KEY: where.key.hex()},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C here is for us: we pass on what it means
    )


def _wait(status: socket.socket, agent: subprocess.Popen[bytes]) -> int:
    """Until the first node says how the job ended, or the agent had to give up."""
    with _interrupted_by_signals():
        lines = status.makefile("r", encoding="utf-8")
        said = lines.readline()
    if said:
        return int(json.loads(said).get("exit_code", 1))
    words = _last_words(agent)
    raise ConnectError("the first node went away", found=words, remedy="Look at its terminal")


def _last_words(agent: subprocess.Popen[bytes]) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        _, words = agent.communicate(timeout=GOODBYE_S)
        return words.decode(errors="replace").strip()
    return ""


@contextlib.contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Ctrl-C and TERM on this node take its agent away, which ends the job on all nodes."""

    def leave(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    before = {one: signal.signal(one, leave) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _end(agent: subprocess.Popen[bytes]) -> None:
    """The agent ends by itself when the job is over; otherwise it is asked to."""
    try:
        agent.wait(0 if sys.exc_info()[0] else GOODBYE_S)
    except subprocess.TimeoutExpired:
        agent.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(GOODBYE_S)
    if agent.poll() is None:
        agent.kill()
        agent.wait()
    if agent.stderr is not None:
        agent.stderr.close()
