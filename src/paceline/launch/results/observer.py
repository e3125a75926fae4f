"""Asks the hosts now and then how busy they are, and writes down where everybody is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from paceline.launch.nodes.fleet import Fleet, Node
from paceline.launch.recorder import Recorder
from paceline.spec.errors import PacelineError

WHERE_S = 1.0  # between two tellings of where the ranks are
VITALS_S = 2.0  # between two questions to a host


class Observer:
    """Keeps the board and ``ranks.json`` up to date while ranks run.

    Args:
        fleet: The nodes.
        recorder: Has the board, and writes the file.
        interface: Which interface of a host the job's traffic goes over.
    """

    def __init__(self, fleet: Fleet, recorder: Recorder, interface: Callable[[str], str]) -> None:
        self._fleet, self._recorder, self._interface = fleet, recorder, interface
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until it is cancelled."""
        asked_at = float("-inf")
        loop = asyncio.get_running_loop()
        try:
            while True:
                if loop.time() - asked_at >= VITALS_S:
                    asked_at = loop.time()
                    self._ask_all()
                await asyncio.sleep(WHERE_S)
                self._recorder.where()
        finally:
            for task in self._asking.values():
                task.cancel()

    def _ask_all(self) -> None:
        """Nobody waits for a host that does not answer, and it is not asked again until then."""
        for node in self._fleet.nodes:
            before = self._asking.get(node.name)
            if not node.lost and (before is None or before.done()):
                self._asking[node.name] = asyncio.ensure_future(self._ask(node))

    async def _ask(self, node: Node) -> None:
        interface = self._interface(node.name)
        with contextlib.suppress(PacelineError, ConnectionError):
            asked = [interface] if interface else []
            vitals = await node.channel.request("vitals", interfaces=asked)
            if self._fleet.has(node):
                self._recorder.board.vitals(node.name, vitals, interface)
