"""The same command typed on each node: any order, a late one, a wrong word, the same ends."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from every_way import EveryWay
from launches import Ended, Site, eventually
from ways import ByHand, Way, site_in

pytestmark = [pytest.mark.lab, pytest.mark.slow]

WORD = "0f3a-word"
MEETING = ("--rdzv", "n1:29431", "--nnodes", "2")


@pytest.fixture(scope="module")
def shared(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return site_in(new_lab, tmp_path_factory.mktemp("hand"))


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    """Nothing may run or listen after a test."""
    yield shared
    assert shared.leftovers() == ""


class TestByHand(EveryWay):
    """Typed on both nodes."""

    @pytest.fixture
    def way(self, site: Site) -> Way:
        return ByHand(site, MEETING, env={"PACELINE_RDZV_ID": WORD})


def typed(site: Site, host: str, *options: str, word: str = WORD) -> Way:
    return Way(site, (*MEETING, *options), host=host, env={"PACELINE_RDZV_ID": word})


@contextlib.contextmanager
def both(first: Way, second: Way, *words: str, pause: float = 0.0,
         verb: str = "run") -> Iterator[list[tuple[subprocess.Popen[str], Path]]]:  # fmt: skip
    """Typed on one node, a while later on the other."""
    with contextlib.ExitStack() as stack:
        started = []
        for way in (first, second):
            directory = way.site.fresh()
            child = stack.enter_context(way.popen(verb, directory, *words))
            stack.callback(lambda c=child: c.poll() is None and c.kill())
            started.append((child, directory))
            time.sleep(pause)
        yield started


def ended(started: list[tuple[subprocess.Popen[str], Path]]) -> list[Ended]:
    found = []
    for child, directory in started:
        out, err = child.communicate(timeout=60)
        found.append(Ended(child.returncode, out, err, 0.0, directory))
    return found


@pytest.mark.parametrize("order", [("n1", "n2"), ("n2", "n1")])
def test_any_order(site: Site, order: tuple[str, str]) -> None:
    ways = [typed(site, name) for name in order]
    with both(*ways, "--no-torch", "-p", "2", "tell.py", pause=0.7) as started:
        done = dict(zip(order, ended(started), strict=True))
    assert [one.code for one in done.values()] == [0, 0], [one.err for one in done.values()]
    places = [done["n1"].said(rank)["place"] for rank in range(4)]
    assert [place["PACELINE_HOST"] for place in places] == ["n1", "n1", "n2", "n2"]
    assert done["n2"].out == ""


def test_interrupted_on_the_other_node(site: Site) -> None:
    ways = typed(site, "n1"), typed(site, "n2")
    with both(*ways, "--no-torch", "--grace", "1", "end.py", "wait") as started:
        assert ways[0].waits(started[0][1], 2)
        started[1][0].send_signal(signal.SIGINT)
        first, second = ended(started)
    assert second.code == 128 + signal.SIGINT, second.err
    assert first.code != 0


def test_nobody_comes(site: Site) -> None:
    ended = typed(site, "n1", "--rdzv-timeout", "1").run("--no-torch", "tell.py")
    assert ended.code == 1
    assert "1 of 2 nodes did not come to n1:29431 within 1 s (node rank 1)" in ended.err


def test_the_first_node_is_not_there(site: Site) -> None:
    ended = typed(site, "n2", "--rdzv-timeout", "1").run("--no-torch", "tell.py")
    assert ended.code == 1
    assert "this node did not meet the first node at n1:29431" in ended.err
    assert "Connection refused" in ended.err


def test_another_word(site: Site) -> None:
    ways = (
        typed(site, "n1", "--rdzv-timeout", "4"),
        typed(site, "n2", "--rdzv-timeout", "2", word="another"),
    )
    with both(*ways, "--no-torch", "tell.py") as started:
        first, second = ended(started)
    assert (first.code, second.code) == (1, 1)
    assert "a launcher with another key answers there" in second.err
    assert "with another --rdzv-id: 10.77.0.12" in first.err


def test_another_script(site: Site) -> None:
    with contextlib.ExitStack() as stack:
        first = typed(site, "n1", "--rdzv-timeout", "4").popen(
            "run", site.fresh(), "--no-torch", "tell.py"
        )
        stack.enter_context(first)
        second = typed(site, "n2").run("--no-torch", "tell.py", "other")
        _, err = first.communicate(timeout=20)
    assert second.code == 1
    assert "this node was given another script or other arguments" in second.err
    assert "1 of 2 nodes did not come" in err


def test_no_word_is_made_up_and_told(site: Site) -> None:
    way = Way(site, MEETING, host="n1")
    with way.started("--no-torch", "tell.py") as (child, _):
        assert child.stderr is not None
        lines = [child.stderr.readline() for _ in range(2)]
        assert "on the other nodes add: --rdzv n1:29431 --rdzv-id " in lines[1]
        word = lines[1].split()[-1]
        other = typed(site, "n2", "--rdzv-id", word).run("--no-torch", "tell.py")
        child.communicate(timeout=20)
    assert (child.returncode, other.code) == (0, 0)
    assert eventually(site.clean, 3)
