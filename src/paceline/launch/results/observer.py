"""Polls the hosts' load, and writes the state of ranks and hosts periodically."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable

from paceline.launch.nodes.fleet import Fleet, Node
from paceline.launch.recorder import Recorder
from paceline.spec.errors import PacelineError

STATE_PERIOD_S = 1.0  # between two versions of ranks.json
VITALS_TICKS = 2  # periods between two requests to a host


class Observer:
    """Keeps the run's state and ``ranks.json`` up to date while ranks run.

    ``interface`` returns the interface that carries a host's job traffic.
    """

    def __init__(self, fleet: Fleet, recorder: Recorder, interface: Callable[[str], str]) -> None:
        self._fleet, self._recorder, self._interface = fleet, recorder, interface
        self._requests: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Runs until it is cancelled."""
        try:
            for tick in itertools.count():
                if tick % VITALS_TICKS == 0:
                    self._request_all()
                await asyncio.sleep(STATE_PERIOD_S)
                self._recorder.write_state()
        finally:
            for task in self._requests.values():
                task.cancel()

    def _request_all(self) -> None:
        """Requests the load of all hosts, except those that have not answered yet."""
        for node in self._fleet.nodes:
            previous = self._requests.get(node.name)
            if not node.lost and (previous is None or previous.done()):
                self._requests[node.name] = asyncio.ensure_future(self._request_vitals(node))

    async def _request_vitals(self, node: Node) -> None:
        interface = self._interface(node.name)
        with contextlib.suppress(PacelineError, ConnectionError):
            interfaces = [interface] if interface else []
            vitals = await node.channel.request("vitals", interfaces=interfaces)
            if node in self._fleet.nodes:
                self._recorder.run_state.add_vitals(node.name, vitals, interface)
