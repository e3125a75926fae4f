"""The same command typed on each node: the first one listens and launches, the others serve it.

The node that has the endpoint's address is the first; the others connect to it, prove that they
know the rendezvous' key, become its agents, and end as the job ends.
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
from paceline.remote.channel import Channel, connect
from paceline.remote.openssh import SshOptions
from paceline.remote.transport import Reached, nobody
from paceline.rendezvous.endpoint import (
    KEY_VARIABLE,
    Endpoint,
    addresses_of,
    listening_addresses,
)
from paceline.rendezvous.listener import Listener, caller_command, caller_config
from paceline.rendezvous.peers import Peers, SameCommand
from paceline.spec.errors import ConnectError, SettingError
from paceline.spec.hosts import Host
from paceline.spec.launched import PROCESS_VARIABLES

GOODBYE_S = 10.0
LOOK_EVERY_S = 0.2
DIAL_S = 30.0  # for the agent, once the first node has answered


def fingerprint(key: bytes, words: Sequence[str]) -> str:
    """What nodes compare to find out that they were told to run the same."""
    return caller.mac(key, "command", *words)


# --- the first node


class TypedTransport:
    """The first node: listens, waits for the others, launches.

    Args:
        endpoint: Where, with how many.
        words: What is to be run; nodes that were given something else are refused.
    """

    redials = False
    dialects: tuple[str, ...] = ()

    def __init__(self, endpoint: Endpoint, words: Sequence[str] = ()) -> None:
        self._endpoint = endpoint
        self.words = words
        self._listener: Listener | None = None
        self._peers: Peers | None = None

    async def open(self, hosts: Sequence[Host], pythons: Sequence[str],
                   reached: Reached = nobody) -> list[Channel]:  # fmt: skip
        """Waits for all nodes. ConnectError when they do not come in time."""
        here = self._endpoint
        command = fingerprint(here.key, self.words)
        peers = self._peers = Peers(SameCommand(here.nodes, here.name, command))
        listener = self._listener = Listener(here.key, peers.take)
        await self._listen(listener)
        own: Channel | None = None
        try:
            this_node = Host(socket.gethostname(), local=True)
            own = await connect(this_node, pythons[0], SshOptions())
            try:
                await asyncio.wait_for(peers.complete.wait(), here.patience_s)
            except asyncio.TimeoutError:
                raise self._nobody_came(peers, listener) from None
            return [own, *await peers.channels()]
        except BaseException:
            peers.hang_up()
            if own is not None:
                await own.close()
            raise

    async def _listen(self, listener: Listener) -> None:
        here = self._endpoint
        try:
            await listener.open(listening_addresses(here), here.port)
        except OSError as error:
            raise SettingError(
                f"the nodes cannot meet at {here.host} port {here.port}",
                found=str(error.strerror or error),
                remedy="Another port in --rdzv, the same on each node",
                exit_code=1,
            ) from None
        if others := here.nodes - 1:
            _say(f"waiting for {others} more of {here.nodes} nodes at {here.host}:{here.port}")
            if here.token:
                _say("type the same command there; it asks for this key (or takes it from "
                     f"{KEY_VARIABLE} or --rdzv-key-file): {here.token}")  # fmt: skip

    def _nobody_came(self, peers: Peers, listener: Listener) -> ConnectError:
        here = self._endpoint
        names = [peer.host.name for peer in peers.by_place.values()]
        found = [f"here: {', '.join([socket.gethostname(), *names])}"]
        if strangers := sorted(set(listener.strangers)):
            found.append(f"with another key: {', '.join(strangers)}")
        missing = [place for place in peers.missing() if place not in peers.by_place]
        return ConnectError(
            f"{len(missing)} of {here.nodes} nodes did not come to "
            f"{here.host}:{here.port} within {here.patience_s:.0f} s "
            f"(node rank {', '.join(map(str, missing))})",
            found="\n".join(found),
            remedy="Type the same command there, with the same key, --rdzv and --nnodes",
        )

    async def close(self, exit_code: int) -> None:
        """Tells the other nodes how it ended."""
        if self._peers is not None:
            self._peers.dismiss(exit_code)
            self._peers.hang_up()
        if self._listener is not None:
            await self._listener.close()

    async def why(self, host: Host) -> str:
        """Nobody but its user knows why a node left."""
        return ""


def _say(text: str) -> None:
    sys.stderr.write(f"paceline: {text}\n")
    sys.stderr.flush()


# --- every other node


def serve(endpoint: Endpoint, words: Sequence[str], python: str) -> int:
    """Serves the first node until the job is over; its exit status is the job's.

    Args:
        endpoint: Where the first node listens.
        words: What this node was told to run.
        python: The interpreter of its ranks.

    Raises:
        ConnectError: The first node does not answer, does not want us, or went away.
    """
    about = {
        "rendezvous": endpoint.name,
        "place": endpoint.place,
        "nodes": endpoint.nodes,
        "command": fingerprint(endpoint.key, words),
        "python": python,
        "workdir": str(Path.cwd()),
    }
    # a name that is not known yet, as that of a pod that is still to come, is asked for again
    known = addresses_of(endpoint.host) or [endpoint.host]
    addresses = [(address, endpoint.port) for address in known]
    mine = {**about, "stream": "status", "name": socket.gethostname()}
    deadline = time.monotonic() + endpoint.patience_s
    try:
        status = caller.dial(list(addresses), endpoint.key, mine, deadline)
    except (OSError, caller.Refused) as error:
        raise not_met(endpoint, str(error)) from None
    _say(f"joined {endpoint.host} as {_place(endpoint)}; output is shown there")
    with status:
        agent = _start_agent(endpoint, addresses, about)
        try:
            exit_code = _wait(status, agent, lambda: caller.dial(
                list(addresses), endpoint.key, mine, time.monotonic()
            ))  # fmt: skip
        finally:
            _end(agent)
    ended = f"failed with exit status {exit_code}" if exit_code else "finished"
    _say(f"the job {ended}; its logs are on {endpoint.host}")
    return exit_code


def _place(endpoint: Endpoint) -> str:
    """This node's rank among the nodes, which of several the first node chooses."""
    place = 1 if endpoint.nodes == 2 else endpoint.place
    return (
        f"one of {endpoint.nodes} nodes" if place is None else f"node {place} of {endpoint.nodes}"
    )


def not_met(endpoint: Endpoint, why: str) -> ConnectError:
    """The error for a first node that does not answer, or does not want us."""
    remedy = "Type the same command there, with --node-rank 0"
    if "another key" in why:
        remedy = "Type the key that the first node shows, or give both the same key file"
    if "--rdzv-id" in why:
        remedy = "Give the same --rdzv-id on each node"
    if "another script" in why:
        remedy = "Type the very same command on each node"
    return ConnectError(
        f"this node did not meet the first node at {endpoint.host}:{endpoint.port}",
        found=why or f"{endpoint.host} is no name that this machine knows",
        remedy=remedy,
    )


def _start_agent(endpoint: Endpoint, addresses: list[tuple[str, int]],
                 about: dict[str, Any]) -> subprocess.Popen[bytes]:  # fmt: skip
    config = caller_config(addresses, [about["python"]], [], PROCESS_VARIABLES, DIAL_S, about)
    return subprocess.Popen(
        caller_command(config),
        env={**os.environ, caller.KEY: endpoint.key.hex()},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C here is for us: we pass on what it means
    )


def _wait(status: socket.socket, agent: subprocess.Popen[bytes],
          again: Callable[[], socket.socket]) -> int:  # fmt: skip
    """Until the first node says how the job ended, or the agent had to give up.

    A machine that lost its power says nothing, and its connection stays: that it is gone, only the
    agent notices, by the lease.

    Args:
        status: Connection by which it will say so.
        agent: This node's.
        again: Makes another connection, where the first broke while both its ends live.
    """
    lines: list[str] = []

    def listen() -> None:
        wire = status
        while not any(lines):
            with contextlib.suppress(OSError), wire:
                lines.append(wire.makefile("r", encoding="utf-8").readline())
            alone = agent.poll() is not None
            try:
                wire = wire if any(lines) else again()
            except (OSError, caller.Refused):
                if alone:
                    return
                time.sleep(LOOK_EVERY_S)

    listening = threading.Thread(target=listen, daemon=True)
    listening.start()
    with _interrupted_by_signals():
        while listening.is_alive() and agent.poll() is None:
            listening.join(LOOK_EVERY_S)
        listening.join(GOODBYE_S)
    if said := "".join(lines):
        return int(json.loads(said).get("exit_code", 1))
    words = ""
    with contextlib.suppress(subprocess.TimeoutExpired):
        words = agent.communicate(timeout=GOODBYE_S)[1].decode(errors="replace").strip()
    raise ConnectError("the first node went away", found=words, remedy="Look at its terminal")


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
