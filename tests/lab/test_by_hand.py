"""Tests the rendezvous: a command typed on each node, in any order, late, or with a wrong key."""

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
RDZV_OPTIONS = ("--rdzv", "n1:29431", "--nnodes", "2")


@pytest.fixture(scope="module")
def shared(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return site_in(new_lab, tmp_path_factory.mktemp("hand"), hosts=3)


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    """Checks that nothing runs or listens after a test."""
    yield shared
    assert shared.leftovers() == ""


class TestByHand(EveryTransport):
    """Runs the tests of all transports with a command typed on both nodes."""

    redials = False

    @pytest.fixture
    def transport(self, site: Site) -> Transport:
        return ByHand(site, RDZV_OPTIONS, env={"PACELINE_RDZV_KEY": KEY})


def command_on(site: Site, host: str, *options: str, key: str = KEY) -> Transport:
    return Transport(site, (*RDZV_OPTIONS, *options), host=host, env={"PACELINE_RDZV_KEY": key})


def is_listening(site: Site) -> bool:
    """Returns whether the first node listens for the others."""
    return any(":29431" in address for address in site.lab.listeners("n1"))


@contextlib.contextmanager
def start_pair(first: Transport, second: Transport, *arguments: str, pause: float = 0.0,
         listens: bool = False) -> Iterator[list[tuple[subprocess.Popen[str], Path]]]:  # fmt: skip
    """Starts the command on one node, and on the other after a pause or once the first listens."""
    with contextlib.ExitStack() as stack:
        started = []
        for transport in (first, second):
            directory = transport.site.fresh()
            child = stack.enter_context(transport.popen("run", directory, *arguments))
            stack.callback(lambda c=child: c.poll() is None and c.kill())
            started.append((child, directory))
            if listens:
                assert eventually(lambda: is_listening(first.site))
            time.sleep(pause)
        yield started


def ended(started: list[tuple[subprocess.Popen[str], Path]]) -> list[Ended]:
    outcomes = []
    for child, directory in started:
        out, err = child.communicate(timeout=TEST_LIMIT_S)
        outcomes.append(Ended(child.returncode, out, err, directory))
    return outcomes


def test_first_node_may_start_first(site: Site) -> None:
    """Here the first node starts first; the tests of all transports start the second node first."""
    transports = [command_on(site, name) for name in ("n1", "n2")]
    with start_pair(*transports, "--no-torch", "-p", "2", "tell.py", listens=True) as started:
        results = dict(zip(("n1", "n2"), ended(started), strict=True))
    assert [result.code for result in results.values()] == [0, 0], [
        result.err for result in results.values()
    ]
    places = [results["n1"].said(rank)["place"] for rank in range(4)]
    assert [place["PACELINE_HOST"] for place in places] == ["n1", "n1", "n2", "n2"]
    assert results["n2"].out == ""
    assert results["n2"].err.splitlines() == [
        "paceline: joined n1 as node 1 of 2; output is shown there",
        "paceline: the job finished; its logs are on n1",
    ]


def test_interrupt_on_second_node_ends_job(site: Site) -> None:
    transports = command_on(site, "n1"), command_on(site, "n2")
    with start_pair(*transports, "--no-torch", "--grace", "1", "end.py", "wait") as started:
        assert transports[0].waits(started[0][1], 2)
        started[1][0].send_signal(signal.SIGINT)
        first, second = ended(started)
    assert second.code == 128 + signal.SIGINT, second.err
    assert first.code != 0


def test_rendezvous_times_out(site: Site) -> None:
    ended = command_on(site, "n1", "--rdzv-timeout", "1").run("--no-torch", "tell.py")
    assert ended.code == 1
    assert "1 of 2 nodes did not come to n1:29431 within 1 s (node rank 1)" in ended.err


def test_reports_missing_first_node(site: Site) -> None:
    ended = command_on(site, "n2", "--rdzv-timeout", "1").run("--no-torch", "tell.py")
    assert ended.code == 1
    assert "this node did not meet the first node at n1:29431" in ended.err
    assert "Connection refused" in ended.err


def test_rejects_wrong_key(site: Site) -> None:
    transports = (
        command_on(site, "n1", "--rdzv-timeout", "10"),
        command_on(site, "n2", "--rdzv-timeout", "2", key="f" * 32),
    )
    with start_pair(*transports, "--no-torch", "tell.py", listens=True) as started:
        first, second = ended(started)
    assert (first.code, second.code) == (1, 1)
    assert "the launcher that answers there has another key" in second.err
    assert "with another key: 10.77.0.12" in first.err
    assert "Traceback" not in first.err + second.err


def test_rejects_different_script(site: Site) -> None:
    with contextlib.ExitStack() as stack:
        first = command_on(site, "n1", "--rdzv-timeout", "10").popen(
            "run", site.fresh(), "--no-torch", "tell.py"
        )
        stack.enter_context(first)
        assert eventually(lambda: is_listening(site))
        second = command_on(site, "n2").run("--no-torch", "tell.py", "other")
        _, err = first.communicate(timeout=TIMEOUT_S)
    assert second.code == 1
    assert "this node was given another script or other arguments" in second.err
    assert "1 of 2 nodes did not come" in err


def test_prints_generated_key(site: Site) -> None:
    """Also with a rendezvous id, which is not a key."""
    transport = Transport(site, (*RDZV_OPTIONS, "--rdzv-id", "456"), host="n1")
    with transport.started("--no-torch", "tell.py") as (child, _):
        assert child.stderr is not None
        lines = [child.stderr.readline() for _ in range(2)]
        assert "type the same command there; it asks for this key" in lines[1]
        key = lines[1].split()[-1]
        unnamed = command_on(site, "n2", "--rdzv-timeout", "5", key=key)
        assert "is called '456'" in unnamed.run("--no-torch", "tell.py").err
        accepted = command_on(site, "n2", "--rdzv-id", "456", key=key).run("--no-torch", "tell.py")
        child.communicate(timeout=TIMEOUT_S)
    assert (child.returncode, accepted.code) == (0, 0)
    assert eventually(site.clean)


def test_forwarded_secret_is_not_in_traffic(site: Site) -> None:
    """Records the nodes' traffic while W&B's key is forwarded; the ranks receive the key."""
    secret = "0123456789abcdef" * 2 + "01234567"  # as long as a key of W&B
    transports = [command_on(site, name, "--env", "WANDB_API_KEY") for name in ("n1", "n2")]
    for transport in transports:
        assert transport.env is not None
        transport.env["WANDB_API_KEY"] = secret
    arguments = ("-p", "1", "--no-python", "sh", "-c", 'printf %s "$WANDB_API_KEY" | sha256sum')
    with sniffed(site) as seen:
        with start_pair(*transports, *arguments) as started:
            results = ended(started)
        assert [result.code for result in results] == [0, 0], results[0].err
    assert results[0].out.count(hashlib.sha256(secret.encode()).hexdigest()) == 2
    assert len(seen) > 10_000
    assert secret.encode() not in seen
    assert KEY.encode() not in seen
    files = [path for path in results[0].directory.rglob("*") if path.is_file()]
    assert [path for path in files if secret.encode() in path.read_bytes()] == []


@pytest.mark.parametrize("lost_host", ["n2", "n1"])
def test_survivor_resumes_after_lost_machine(site: Site, lost_host: str) -> None:
    """The remaining command fails; typed again, it resumes alone from the shared checkpoint."""
    remaining_host = "n1" if lost_host == "n2" else "n2"
    run_dir = site.fresh()
    arguments = ("-p", "1", "--lease", "6", "--run-dir", str(run_dir), "steps.py", "120")
    checkpoints = run_dir / "checkpoints"
    with start_pair(command_on(site, "n1"), command_on(site, "n2"), *arguments) as started:
        assert eventually(lambda: any(checkpoints.glob("[0-9]*"))), list(
            checkpoints.glob("*")
        )  # a complete one
        site.lab.fault("power-off", lost_host)
        survivor = started[0 if remaining_host == "n1" else 1][0]
        _, err = survivor.communicate(timeout=TEST_LIMIT_S)
    site.lab.heal()
    assert survivor.returncode == 1, err
    assert ("n2" in err) if lost_host == "n2" else ("the first node went away" in err), err
    single_host = Transport(site, (), host=remaining_host)
    if lost_host == "n1":  # n2 cannot know whether the launcher on n1 still runs
        with single_host.popen("run", run_dir, "-p", "1", "steps.py", "120") as child:
            _, err = child.communicate(timeout=TEST_LIMIT_S)
        assert f"if n1 is gone for good: rm {run_dir}/owner.json" in err
        (run_dir / "owner.json").unlink()
    with single_host.popen("run", run_dir, "-p", "1", "steps.py", "120") as child:
        out, err = child.communicate(timeout=TEST_LIMIT_S)
    assert child.returncode == 0, err
    assert "resumed after step" in out + err


def test_names_altered_bytes(site: Site) -> None:
    """A byte of one packet a second is changed, in each direction; the job goes on."""
    chain = "add chain ip altered c {{ type filter hook {} priority 0; }}\n"
    rule = (
        "add rule ip altered c tcp {} 29431 meta length > 120"
        " limit rate 1/second burst 1 packets @ih,320,8 set 0x41\n"
    )
    arguments = ("--no-torch", "count.py", "1500", "0.01")
    with start_pair(command_on(site, "n1"), command_on(site, "n2"), *arguments) as started:
        events = started[0][1] / "events.jsonl"
        logs = started[0][1] / "logs"
        assert eventually(lambda: len(list(logs.glob("*/[01].log"))) == 2)
        count = lambda: events.read_text().count('"connection restored"')  # noqa: E731
        for hook, field in (("output", "dport"), ("input", "sport")):
            rules = "add table ip altered\n" + chain.format(hook) + rule.format(field)
            site.lab.exec("n2", ["nft", "-f", "-"], input=rules, check=True)
            num_restored = count()
            try:
                assert eventually(lambda: count() > num_restored)  # noqa: B023
            finally:
                site.lab.exec("n2", ["nft", "delete", "table", "ip", "altered"], check=True)
        first, second = ended(started)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "n2 was lost: bytes were changed on the way between this machine and n2" in first.err
    assert {event["address"] for event in first.events("connection altered")} == {
        site.lab.address("n1")
    }


def test_reconnects_after_broken_connection(site: Site) -> None:
    lines = 800
    arguments = ("--no-torch", "count.py", str(lines), "0.01")
    with start_pair(command_on(site, "n1"), command_on(site, "n2"), *arguments) as started:
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
