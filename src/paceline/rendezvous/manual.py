"""The rendezvous of nodes on which a person typed the same command.

The node with the endpoint's address is the first: it listens and launches. The others connect to
it, prove that they know the key, become its agents, and exit with the job's status.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.agent import caller
from paceline.remote.channel import Channel
from paceline.remote.login import connect
from paceline.remote.openssh import SshOptions
from paceline.remote.transport import ConnectedCallback, Transport, ignore_count
from paceline.rendezvous.endpoint import KEY_VARIABLE, Endpoint, listening_addresses, resolve
from paceline.rendezvous.listener import Listener, caller_command, caller_config
from paceline.rendezvous.peers import CommandAdmission, Peers
from paceline.spec.errors import ConnectError, SettingError
from paceline.spec.hosts import Host
from paceline.spec.launchers import PROCESS_VARIABLES

GOODBYE_S = 10.0
POLL_S = 0.2
DIAL_S = 30.0  # for the agent, once the first node has answered


def fingerprint(key: bytes, command: Sequence[str]) -> str:
    """Keyed hash of a command, by which nodes check that they run the same."""
    return caller.mac(key, "command", *command)


# --- the first node


class ManualTransport(Transport):
    """The first node: listens, waits for the others, launches.

    Args:
        endpoint: The rendezvous.
        command: The command to run; nodes with another command are rejected.
        encrypts: Whether the job is encrypted; nodes that were told otherwise are rejected.
    """

    redials = False
    dialects: tuple[str, ...] = ()

    def __init__(
        self, endpoint: Endpoint, command: Sequence[str] = (), encrypts: bool = False
    ) -> None:
        self._endpoint = endpoint
        self.command = command
        self.encrypts = encrypts
        self._listener: Listener | None = None
        self._peers: Peers | None = None

    async def open(self, hosts: Sequence[Host], pythons: Sequence[str],
                   on_connected: ConnectedCallback = ignore_count) -> list[Channel]:  # fmt: skip
        """Waits for all nodes; raises ConnectError if some do not connect in time."""
        endpoint = self._endpoint
        command = fingerprint(endpoint.key, self.command)
        peers = self._peers = Peers(
            CommandAdmission(endpoint.nodes, endpoint.name, command, self.encrypts)
        )
        listener = self._listener = Listener(endpoint.key, peers.admit)
        await self._listen(listener)
        local: Channel | None = None
        try:
            this_node = Host(socket.gethostname(), local=True)
            local = await connect(this_node, pythons[0], SshOptions())
            try:
                await asyncio.wait_for(peers.complete.wait(), endpoint.timeout_s)
            except asyncio.TimeoutError:
                raise self._timeout_error(peers, listener) from None
            return [local, *await peers.channels()]
        except BaseException:
            peers.hang_up()
            if local is not None:
                await local.close()
            raise

    async def _listen(self, listener: Listener) -> None:
        endpoint = self._endpoint
        try:
            await listener.open(listening_addresses(endpoint), endpoint.port)
        except OSError as error:
            raise SettingError(
                f"the nodes cannot meet at {endpoint.host} port {endpoint.port}",
                found=str(error.strerror or error),
                remedy="Another port in --rdzv, the same on each node",
                exit_code=1,
            ) from None
        if missing := endpoint.nodes - 1:
            _print(f"waiting for {missing} more of {endpoint.nodes} nodes at"
                   f" {endpoint.host}:{endpoint.port}")  # fmt: skip
            if endpoint.token:
                _print("type the same command there; it asks for this key (or takes it from "
                     f"{KEY_VARIABLE} or --rdzv-key-file): {endpoint.token}")  # fmt: skip

    def _timeout_error(self, peers: Peers, listener: Listener) -> ConnectError:
        endpoint = self._endpoint
        names = [peer.host.name for peer in peers.by_place.values()]
        details = [f"here: {', '.join([socket.gethostname(), *names])}"]
        if strangers := sorted(set(listener.strangers)):
            details.append(f"with another key: {', '.join(strangers)}")
        missing = [place for place in peers.missing() if place not in peers.by_place]
        return ConnectError(
            f"{len(missing)} of {endpoint.nodes} nodes did not come to "
            f"{endpoint.host}:{endpoint.port} within {endpoint.timeout_s:.0f} s "
            f"(node rank {', '.join(map(str, missing))})",
            found="\n".join(details),
            remedy="Type the same command there, with the same key, --rdzv and --nnodes",
        )

    async def close(self, exit_code: int) -> None:
        """Sends the exit status to the other nodes."""
        if self._peers is not None:
            self._peers.dismiss(exit_code)
            self._peers.hang_up()
        if self._listener is not None:
            await self._listener.close()


def _print(text: str) -> None:
    sys.stderr.write(f"paceline: {text}\n")
    sys.stderr.flush()


# --- every other node


def serve(endpoint: Endpoint, command: Sequence[str], python: str, encrypts: bool = False) -> int:
    """Serves the first node until the job ends; returns the job's exit status.

    Raises ConnectError if the first node does not answer, rejects this node, or went away.
    """
    info = {
        "rendezvous": endpoint.name,
        "place": endpoint.place,
        "nodes": endpoint.nodes,
        "command": fingerprint(endpoint.key, command),
        "encrypt": encrypts,
        "python": python,
        "workdir": str(Path.cwd()),
    }
    # an unknown name may become known, such as that of a pod; it is resolved again
    resolved = resolve(endpoint.host) or [endpoint.host]
    addresses = [(address, endpoint.port) for address in resolved]
    status_info = {**info, "stream": "status", "name": socket.gethostname()}
    deadline = time.monotonic() + endpoint.timeout_s
    try:
        status = caller.dial(list(addresses), endpoint.key, status_info, deadline)
    except (OSError, caller.CallRefused) as error:
        raise rendezvous_error(endpoint, str(error)) from None
    _print(f"joined {endpoint.host} as {_place(endpoint)}; output is shown there")
    certificate = caller.certificate_of(status)
    with status:
        agent = _start_agent(endpoint, addresses, certificate, info)
        try:
            exit_code = _wait(status, agent, lambda: caller.dial(
                list(addresses), endpoint.key, status_info, time.monotonic(), certificate
            ))  # fmt: skip
        finally:
            _end(agent)
    outcome = f"failed with exit status {exit_code}" if exit_code else "finished"
    _print(f"the job {outcome}; its logs are on {endpoint.host}")
    return exit_code


def _place(endpoint: Endpoint) -> str:
    """This node's rank, if it is known here."""
    place = 1 if endpoint.nodes == 2 else endpoint.place
    if place is None:
        return f"one of {endpoint.nodes} nodes"
    return f"node {place} of {endpoint.nodes}"


def rendezvous_error(endpoint: Endpoint, reason: str) -> ConnectError:
    """The error for a first node that does not answer, or rejects this node."""
    remedy = "Type the same command there, with --node-rank 0"
    if "another key" in reason:
        remedy = "Type the key that the first node shows, or give both the same key file"
    if "--rdzv-id" in reason:
        remedy = "Give the same --rdzv-id on each node"
    if "--encrypt" in reason:
        remedy = "Add --encrypt on each node, or on none"
    if "another script" in reason:
        remedy = "Type the very same command on each node"
    return ConnectError(
        f"this node did not meet the first node at {endpoint.host}:{endpoint.port}",
        found=reason or f"{endpoint.host} is not a name that this machine can resolve",
        remedy=remedy,
    )


def _start_agent(endpoint: Endpoint, addresses: list[tuple[str, int]], certificate: str,
                 info: dict[str, Any]) -> subprocess.Popen[bytes]:  # fmt: skip
    config = caller_config(
        addresses, certificate, [info["python"]], [], PROCESS_VARIABLES, DIAL_S, info
    )
    return subprocess.Popen(
        caller_command(config),
        env={**os.environ, caller.KEY_VARIABLE: endpoint.key.hex()},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,  # this process handles Ctrl-C
    )


def _wait(status: socket.socket, agent: subprocess.Popen[bytes],
          reconnect: Callable[[], socket.socket]) -> int:  # fmt: skip
    """Waits for the job's exit status on a node after the first, or for the end of its agent.

    If the first node loses power, its connection stays open; only the agent's lease detects that.
    """
    lines: list[str] = []

    def listen() -> None:
        connection = status
        while not any(lines):
            with contextlib.suppress(OSError), connection:
                lines.append(connection.makefile("r", encoding="utf-8").readline())
            has_ended = agent.poll() is not None
            try:
                connection = connection if any(lines) else reconnect()
            except (OSError, caller.CallRefused):
                if has_ended:
                    return
                time.sleep(POLL_S)

    listening = threading.Thread(target=listen, daemon=True)
    listening.start()
    with _interrupted_by_signals():
        while listening.is_alive() and agent.poll() is None:
            listening.join(POLL_S)
        listening.join(GOODBYE_S)
    if message := "".join(lines):
        return int(json.loads(message).get("exit_code", 1))
    stderr = ""
    with contextlib.suppress(subprocess.TimeoutExpired):
        stderr = agent.communicate(timeout=GOODBYE_S)[1].decode(errors="replace").strip()
    raise ConnectError("the first node went away", found=stderr, remedy="Look at its terminal")


@contextlib.contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM end this node's agent, which ends the job on all nodes."""

    def exit_on_signal(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    handlers = {s: signal.signal(s, exit_on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def _end(agent: subprocess.Popen[bytes]) -> None:
    """Waits for the agent's end, then terminates, then kills it."""
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
