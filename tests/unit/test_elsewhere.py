"""The way to a supervisor on another host, when the connection to it breaks in whatever manner."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.runs import client, sync
from paceline.cli.runs.client import RemoteLauncher
from paceline.remote.channel import HostUnresponsive
from paceline.spec.detached import SupervisorLocation
from paceline.spec.errors import ConnectError, NodeError
from paceline.spec.hosts import Host
from paceline.transfer.follow import RunState, UnknownRun

BREAKS = [ConnectionError("n2 is gone"), HostUnresponsive(Host("n2", "n2"), 4.0)]


class Channel:
    async def close(self) -> None:
        """Nothing was opened."""


class Following:
    """A follower whose answers are given; an exception among them is raised."""

    channel = Channel()
    has_report = False

    def __init__(self, *answers: Any, behind: int = 0) -> None:
        self._answers = list(answers)
        self._behind = behind  # after so many answers

    @property
    def is_behind(self) -> bool:
        self._behind -= 1
        return self._behind >= 0

    async def refresh(self) -> RunState:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, RunState)
        return answer

    async def finish(self, _: str, note: Any) -> bool:
        await self.refresh()
        return True

    async def discard(self, *, fetched: bool) -> None:
        """Nothing lies there."""

    async def ask(self, _: Any) -> None:
        await self.refresh()

    async def signal(self, _: int) -> None:
        await self.refresh()


@pytest.fixture
def way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A way whose connections have these followers, one after the other."""
    monkeypatch.setattr(client, "RECONNECT_DELAY_S", 0.0)

    def to(*followers: Following) -> RemoteLauncher:
        left = list(followers)

        async def follow(*_: object) -> Following:
            return left.pop(0)

        monkeypatch.setattr(client, "follow", follow)
        return RemoteLauncher(tmp_path, SupervisorLocation("ab" * 6, "n2", "n2", "/x", 1.0))

    return to


RUNNING, ENDED = RunState("running", None), RunState("ended", None)


@pytest.mark.parametrize("broken", BREAKS)
def test_a_run_goes_on_while_its_supervisor_cannot_be_heard(way: Any, broken: Exception) -> None:
    there = way(Following(RUNNING, broken), Following(ENDED))

    async def looks() -> None:
        assert not (await there.look()).is_over
        assert not (await there.look()).is_over
        assert there.last_error
        assert (await there.look()).is_over  # dialled again
        assert not there.last_error

    asyncio.run(looks())


@pytest.mark.parametrize("broken", BREAKS)
def test_a_connection_that_breaks_is_an_error_in_words(
    way: Any, broken: Exception, tmp_path: Path
) -> None:
    async def ends(does: str, *answers: Any, **how: Any) -> None:
        there = way(Following(*answers))
        if does != "look":
            await there.look()
        await getattr(there, does)(**how)

    (tmp_path / "detached.json").write_text(
        '{"run_id": "abababababab", "host": "n2", "folder": "/x"}'
    )
    cases: list[tuple[Any, ...]] = [
        ("look", broken), ("fetch_results", ENDED, broken), ("request", RUNNING, broken)
    ]  # fmt: skip
    for does, *answers in cases:
        how = {"message": {}} if does == "request" else {}
        with pytest.raises(ConnectError, match="the connection to n2 is lost"):
            asyncio.run(ends(does, *answers, **how))
    with pytest.raises(ConnectError, match="the connection to n2 is lost"):
        asyncio.run(ends("stop", RUNNING, NodeError("no answer"), broken, immediately=False))


def test_a_run_that_somebody_else_has_brought_home_is_over(way: Any) -> None:
    there = way(Following(RUNNING, UnknownRun("gone")))

    async def looks() -> None:
        await there.look()
        assert (await there.look()).is_over

    asyncio.run(looks())


@pytest.mark.parametrize(("ago_s", "waits"), [(1.0, 29.0), (31.0, None), (-500.0, 30.0)])
def test_what_ranks_save_after_their_supervisor_was_lost_comes_home_too(
    way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ago_s: float, waits: float | None
) -> None:
    """Its folder on the host goes then: not before the lease is over, which ends the ranks."""
    back = SupervisorLocation("ab" * 6, "n2", "n2", "/x", 1.0).to_json()
    lease = {"settings": {"lease_s": {"value": 30.0}}}
    where = {"time": time.time() - ago_s, "ranks": [], "hang": ""}
    for name, said in {"detached": back, "plan": lease, "ranks": where}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(said))
    lost = RunState("lost", None)
    there, slept = way(Following(lost, lost, lost)), list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def comes_home() -> None:
        await there.look()
        monkeypatch.setattr(sync.asyncio, "sleep", sleep)
        await there.fetch_results()

    asyncio.run(comes_home())
    assert slept == ([] if waits is None else [pytest.approx(waits, abs=5)])


def test_who_looks_once_looks_again_where_a_file_changed_meanwhile(way: Any) -> None:
    """``ranks.json`` is written every second: of an old one nobody knows that it is old."""
    for behind, looks in ((0, 1), (1, 2), (99, 4)):
        following = Following(*[RUNNING] * 9, behind=behind)
        asyncio.run(sync._sync_once(way(following), None))
        assert 9 - len(following._answers) == looks


def test_what_cannot_be_written_here_does_not_end_the_run(way: Any) -> None:
    there = way(Following(RUNNING, NodeError("cannot write what n2 sends")))

    async def looks() -> None:
        await there.look()
        with pytest.raises(NodeError, match="cannot write"):
            await there.look()

    asyncio.run(looks())
