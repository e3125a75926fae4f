"""Tests the client of a remote supervisor when its connection breaks."""

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

CONNECTION_ERRORS = [ConnectionError("n2 is gone"), HostUnresponsive(Host("n2", "n2"), 4.0)]


class FakeChannel:
    async def close(self) -> None:
        """Does nothing: no connection is open."""


class FakeFollower:
    """Stands in for a follower: returns the given answers, and raises those that are exceptions."""

    channel = FakeChannel()
    has_report = False

    def __init__(self, *answers: Any, behind: int = 0) -> None:
        self._answers = list(answers)
        self._behind = behind  # up to date after this many answers

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
        """Does nothing: there is no remote folder."""

    async def ask(self, _: Any) -> None:
        await self.refresh()

    async def signal(self, _: int) -> None:
        await self.refresh()


@pytest.fixture
def make_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that creates a remote launcher whose connections use these followers."""
    monkeypatch.setattr(client, "RECONNECT_DELAY_S", 0.0)

    def with_followers(*followers: FakeFollower) -> RemoteLauncher:
        remaining = list(followers)

        async def follow(*_: object) -> FakeFollower:
            return remaining.pop(0)

        monkeypatch.setattr(client, "follow", follow)
        return RemoteLauncher(tmp_path, SupervisorLocation("ab" * 6, "n2", "n2", "/x", 1.0))

    return with_followers


RUNNING, ENDED = RunState("running", None), RunState("ended", None)


@pytest.mark.parametrize("broken", CONNECTION_ERRORS)
def test_run_continues_while_supervisor_is_unreachable(
    make_launcher: Any, broken: Exception
) -> None:
    launcher = make_launcher(FakeFollower(RUNNING, broken), FakeFollower(ENDED))

    async def polls() -> None:
        assert not (await launcher.look()).is_over
        assert not (await launcher.look()).is_over
        assert launcher.last_error
        assert (await launcher.look()).is_over  # reconnected
        assert not launcher.last_error

    asyncio.run(polls())


@pytest.mark.parametrize("broken", CONNECTION_ERRORS)
def test_broken_connection_raises_connect_error(
    make_launcher: Any, broken: Exception, tmp_path: Path
) -> None:
    async def call_method(method: str, *answers: Any, **kwargs: Any) -> None:
        launcher = make_launcher(FakeFollower(*answers))
        if method != "look":
            await launcher.look()
        await getattr(launcher, method)(**kwargs)

    (tmp_path / "detached.json").write_text(
        '{"run_id": "abababababab", "host": "n2", "folder": "/x"}'
    )
    cases: list[tuple[Any, ...]] = [
        ("look", broken), ("fetch_results", ENDED, broken), ("request", RUNNING, broken)
    ]  # fmt: skip
    for method, *answers in cases:
        kwargs = {"message": {}} if method == "request" else {}
        with pytest.raises(ConnectError, match="the connection to n2 is lost"):
            asyncio.run(call_method(method, *answers, **kwargs))
    with pytest.raises(ConnectError, match="the connection to n2 is lost"):
        asyncio.run(call_method("stop", RUNNING, NodeError("no answer"), broken, immediately=False))


def test_run_fetched_by_another_client_is_over(make_launcher: Any) -> None:
    launcher = make_launcher(FakeFollower(RUNNING, UnknownRun("gone")))

    async def polls() -> None:
        await launcher.look()
        assert (await launcher.look()).is_over

    asyncio.run(polls())


@pytest.mark.parametrize(("ago_s", "expected_wait_s"), [(1.0, 29.0), (31.0, None), (-500.0, 30.0)])
def test_fetch_of_lost_run_waits_for_lease(
    make_launcher: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ago_s: float,
    expected_wait_s: float | None,
) -> None:
    """The remote folder is removed only after the lease has expired and the ranks have ended."""
    location = SupervisorLocation("ab" * 6, "n2", "n2", "/x", 1.0).to_json()
    lease = {"settings": {"lease_s": {"value": 30.0}}}
    rank_states = {"run_id": "ab" * 6, "time": time.time() - ago_s, "ranks": [], "hang": ""}
    for name, content in {"detached": location, "plan": lease, "ranks": rank_states}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    lost_state = RunState("lost", None)
    launcher, slept = make_launcher(FakeFollower(lost_state, lost_state, lost_state)), list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def fetch_run() -> None:
        await launcher.look()
        monkeypatch.setattr(sync.asyncio, "sleep", sleep)
        await launcher.fetch_results()

    asyncio.run(fetch_run())
    assert slept == ([] if expected_wait_s is None else [pytest.approx(expected_wait_s, abs=5)])


def test_sync_once_refreshes_while_follower_is_behind(make_launcher: Any) -> None:
    """``ranks.json`` changes every second, and an outdated copy is not recognisable as such."""
    for behind, polls in ((0, 1), (1, 2), (99, 4)):
        follower = FakeFollower(*[RUNNING] * 9, behind=behind)
        asyncio.run(sync._sync_once(make_launcher(follower), None))
        assert 9 - len(follower._answers) == polls


def test_local_write_error_is_not_connection_loss(make_launcher: Any) -> None:
    launcher = make_launcher(FakeFollower(RUNNING, NodeError("cannot write what n2 sends")))

    async def polls() -> None:
        await launcher.look()
        with pytest.raises(NodeError, match="cannot write"):
            await launcher.look()

    asyncio.run(polls())
