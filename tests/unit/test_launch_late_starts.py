"""Tests starting newcomers while the last of the other ranks exits."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from paceline.agent.supervision.job import NodeJob
from paceline.agent.supervision.processes import Process
from paceline.agent.supervision.rank_process import RankProcess
from paceline.launch.elastic.members import Members
from paceline.launch.elastic.rank_states import Start
from paceline.launch.elastic.recovery import RankCommands, RecoveryController
from paceline.spec.settings import Setting


def test_exit_is_matched_by_pid() -> None:
    job, rank = NodeJob(lambda *_: None, ""), RankProcess(0, 0)
    rank.process = Process(200, 1)
    job.ranks = [rank]
    ended = {"local_rank": 0, "status": 0, "time": 1.0, "peak": 0}
    job._handle_message({**ended, "exited": 100})  # the former process of this rank
    assert rank.status is None
    job._handle_message({**ended, "exited": 200})
    assert rank.status == 0


def test_close_awaits_pending_starts_and_sends_no_further_ones() -> None:
    asyncio.run(_late_starts())


async def _late_starts() -> None:
    requests: list[str] = []
    answer = asyncio.Event()

    async def request(op: str, **_: Any) -> None:
        requests.append(op)
        await answer.wait()

    node: Any = SimpleNamespace(
        name="n1", running=False, lost=False, channel=SimpleNamespace(request=request)
    )
    part = SimpleNamespace(host="n1", address="n1", ranks=[SimpleNamespace(rank=0)])
    plan: Any = SimpleNamespace(nodes=[part], master_addr="n1", master_port=1, closed_store=False)
    fleet: Any = SimpleNamespace(nodes=[node], named=lambda _: node)
    spec = {"ranks": [{"rank": 0, "env": {}}]}
    unused: Any = None
    job: Any = SimpleNamespace(encrypt=Setting(False))
    commands = RankCommands(plan, job, fleet, "")
    commands.start_request = lambda *_: spec  # type: ignore[method-assign]
    commands._admitted = lambda: ""  # type: ignore[method-assign]
    recovery = RecoveryController(commands, Members({0: "n1"}), fleet, unused, unused, unused,
                                  unused)  # fmt: skip
    posting = asyncio.ensure_future(recovery._send_orders())
    recovery._execute(Start("n1", (0,)))
    while not requests:
        await asyncio.sleep(0)
    closing = asyncio.ensure_future(recovery.close(60.0))
    recovery._execute(Start("n1", (0,)))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not closing.done()
    answer.set()
    await closing
    assert node.running  # so that the attempt ends the new ranks
    assert requests == ["add_ranks"]
    posting.cancel()
