"""The same command typed on each node: any order, a late one, a wrong word, the same ends."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from every_transport import EveryTransport
from launches import TEST_LIMIT_S, TIMEOUT_S, Ended, Site, eventually
from transports import ByHand, Transport, site_in, sniffed

pytestmark = [pytest.mark.lab, pytest.mark.slow]

KEY = "00112233445566778899aabbccddeeff"
MEETING = ("--rdzv", "n1:29431", "--nnodes", "2")


@pytest.fixture(scope="module")
def shared(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return site_in(new_lab, tmp_path_factory.mktemp("hand"), hosts=3)


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    """Nothing may run or listen after a test."""
    yield shared
    assert shared.leftovers() == ""


class TestByHand(EveryTransport):
    """Typed on both nodes."""

    redials = False

    @pytest.fixture
    def transport(self, site: Site) -> Transport:
        return ByHand(site, MEETING, env={"PACELINE_RDZV_KEY": KEY})


def typed(site: Site, host: str, *options: str, key: str = KEY) -> Transport:
    return Transport(site, (*MEETING, *options), host=host, env={"PACELINE_RDZV_KEY": key})


def meets(site: Site) -> bool:
    """Whether the first node listens for the others."""
    return any(":29431" in address for address in site.lab.listeners("n1"))


@contextlib.contextmanager
def both(first: Transport, second: Transport, *words: str, pause: float = 0.0,
         listens: bool = False) -> Iterator[list[tuple[subprocess.Popen[str], Path]]]:  # fmt: skip
    """Typed on one node, a while later or when that one listens on the other."""
    with contextlib.ExitStack() as stack:
        started = []
        for transport in (first, second):
            directory = transport.site.fresh()
            child = stack.enter_context(transport.popen("run", directory, *words))
            stack.callback(lambda c=child: c.poll() is None and c.kill())
            started.append((child, directory))
            if listens:
                assert eventually(lambda: meets(first.site))
            time.sleep(pause)
        yield started


def ended(started: list[tuple[subprocess.Popen[str], Path]]) -> list[Ended]:
    found = []
    for child, directory in started:
        out, err = child.communicate(timeout=TEST_LIMIT_S)
        found.append(Ended(child.returncode, out, err, directory))
    return found


def test_any_order(site: Site) -> None:
    """The first node first; all that every transport does is typed on the second one first."""
    transports = [typed(site, name) for name in ("n1", "n2")]
    with both(*transports, "--no-torch", "-p", "2", "tell.py", listens=True) as started:
        done = dict(zip(("n1", "n2"), ended(started), strict=True))
    assert [one.code for one in done.values()] == [0, 0], [one.err for one in done.values()]
    places = [done["n1"].said(rank)["place"] for rank in range(4)]
    assert [place["PACELINE_HOST"] for place in places] == ["n1", "n1", "n2", "n2"]
    assert done["n2"].out == ""
    assert done["n2"].err.splitlines() == [
        "paceline: joined n1 as node 1 of 2; output is shown there",
        "paceline: the job finished; its logs are on n1",
    ]


def test_interrupted_on_the_other_node(site: Site) -> None:
    transports = typed(site, "n1"), typed(site, "n2")
    with both(*transports, "--no-torch", "--grace", "1", "end.py", "wait") as started:
        assert transports[0].waits(started[0][1], 2)
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


def test_another_key(site: Site) -> None:
    transports = (
        typed(site, "n1", "--rdzv-timeout", "10"),
        typed(site, "n2", "--rdzv-timeout", "2", key="f" * 32),
    )
    with both(*transports, "--no-torch", "tell.py", listens=True) as started:
        first, second = ended(started)
    assert (first.code, second.code) == (1, 1)
    assert "the launcher that answers there has another key" in second.err
    assert "with another key: 10.77.0.12" in first.err
    assert "Traceback" not in first.err + second.err


def test_another_script(site: Site) -> None:
    with contextlib.ExitStack() as stack:
        first = typed(site, "n1", "--rdzv-timeout", "10").popen(
            "run", site.fresh(), "--no-torch", "tell.py"
        )
        stack.enter_context(first)
        assert eventually(lambda: meets(site))
        second = typed(site, "n2").run("--no-torch", "tell.py", "other")
        _, err = first.communicate(timeout=TIMEOUT_S)
    assert second.code == 1
    assert "this node was given another script or other arguments" in second.err
    assert "1 of 2 nodes did not come" in err


def test_a_key_is_made_up_and_told(site: Site) -> None:
    """And a chosen name goes with it, which is no key."""
    transport = Transport(site, (*MEETING, "--rdzv-id", "456"), host="n1")
    with transport.started("--no-torch", "tell.py") as (child, _):
        assert child.stderr is not None
        lines = [child.stderr.readline() for _ in range(2)]
        assert "type the same command there; it asks for this key" in lines[1]
        key = lines[1].split()[-1]
        unnamed = typed(site, "n2", "--rdzv-timeout", "5", key=key)
        assert "is called '456'" in unnamed.run("--no-torch", "tell.py").err
        other = typed(site, "n2", "--rdzv-id", "456", key=key).run("--no-torch", "tell.py")
        child.communicate(timeout=TIMEOUT_S)
    assert (child.returncode, other.code) == (0, 0)
    assert eventually(site.clean)


def test_a_forwarded_secret_cannot_be_read_off_the_wire(site: Site) -> None:
    """What passes between the nodes is written down while W&B's key travels; ranks have it."""
    secret = "0123456789abcdef" * 2 + "01234567"  # as long as W&B's
    transports = [typed(site, name, "--env", "WANDB_API_KEY") for name in ("n1", "n2")]
    for transport in transports:
        assert transport.env is not None
        transport.env["WANDB_API_KEY"] = secret
    words = ("-p", "1", "--no-python", "sh", "-c", 'printf %s "$WANDB_API_KEY" | sha256sum')
    with sniffed(site) as seen:
        with both(*transports, *words) as started:
            done = ended(started)
        assert [one.code for one in done] == [0, 0], done[0].err
    assert done[0].out.count(hashlib.sha256(secret.encode()).hexdigest()) == 2
    assert len(seen) > 10_000
    assert secret.encode() not in seen
    assert KEY.encode() not in seen
    files = [path for path in done[0].directory.rglob("*") if path.is_file()]
    assert [path for path in files if secret.encode() in path.read_bytes()] == []


@pytest.mark.parametrize("gone", ["n2", "n1"])
def test_one_of_the_two_machines_is_lost(site: Site, gone: str) -> None:
    """The other one ends by itself, and goes on alone from the checkpoint on the disk of both."""
    left = "n1" if gone == "n2" else "n2"
    run_dir = site.fresh()
    words = ("-p", "1", "--lease", "6", "--run-dir", str(run_dir), "steps.py", "120")
    kept = run_dir / "checkpoints"
    with both(typed(site, "n1"), typed(site, "n2"), *words) as started:
        assert eventually(lambda: any(kept.glob("[0-9]*"))), list(kept.glob("*"))  # none half made
        site.lab.fault("power-off", gone)
        survivor = started[0 if left == "n1" else 1][0]
        _, err = survivor.communicate(timeout=TEST_LIMIT_S)
    site.lab.heal()
    assert survivor.returncode == 1, err
    assert ("n2" in err) if gone == "n2" else ("the first node went away" in err), err
    alone = Transport(site, (), host=left)
    if gone == "n1":  # whose launcher may still be at work, for all that the other one knows
        with alone.popen("run", run_dir, "-p", "1", "steps.py", "120") as child:
            _, err = child.communicate(timeout=TEST_LIMIT_S)
        assert f"if n1 is gone for good: rm {run_dir}/owner.json" in err
        (run_dir / "owner.json").unlink()
    with alone.popen("run", run_dir, "-p", "1", "steps.py", "120") as child:
        out, err = child.communicate(timeout=TEST_LIMIT_S)
    assert child.returncode == 0, err
    assert "resumed after step" in out + err


def test_a_connection_that_is_cut_is_made_again(site: Site) -> None:
    lines = 800
    words = ("--no-torch", "count.py", str(lines), "0.01")
    with both(typed(site, "n1"), typed(site, "n2"), *words) as started:
        logs = started[0][1] / "logs"
        assert eventually(lambda: len(list(logs.glob("*/[01].log"))) == 2)
        time.sleep(1)
        site.lab.fault("reject", "n1", "29431")
        time.sleep(1.5)
        site.lab.heal()
        first, second = ended(started)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "was lost; dialled again after" in first.err
    assert first.events("connection restored")
    for rank in (0, 1):
        (log,) = logs.glob(f"*/{rank}.log")
        out = [line for line in log.read_text().splitlines() if f"{rank} out " in line]
        assert [int(line.split()[-2]) for line in out] == list(range(lines))
