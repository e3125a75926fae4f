"""Whatever is lost of a job whose ranks can go on without it: the others do, and it comes back.

The ranks only say and hear what a training does (``member.py``); trainings that are struck stand in
``test_outlive.py``.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from launches import Ended, Launch, Site, eventually, healed, shared_site

pytestmark = pytest.mark.lab

LEASE_S = 10.0
LONG = "300"  # seconds that they would train
OVER = "over"  # the file that ends it
OPTIONS = ("--no-torch", "--lease", str(LEASE_S), "member.py")


@pytest.fixture(scope="module")
def shared(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return shared_site(new_lab, tmp_path_factory.mktemp("recovery"), hosts=3)


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    (shared.project / OVER).unlink(missing_ok=True)
    yield from healed(shared)


def running(site: Site, *words: str, ranks: int = 3) -> Launch:
    """A launch whose ranks train."""
    at = words.index("member.py") if "member.py" in words else 0
    options = [*words[:at], *OPTIONS, *words[at + bool(at) :]]
    launch = site.start(*options).wait_for("began", times=ranks)
    time.sleep(0.5)
    return launch


def over(site: Site, launch: Launch) -> Ended:
    """All ranks end in order, for what was to be seen has been."""
    (site.project / OVER).touch()
    return launch.end()


def recovered(ended: Ended, count: int = 1) -> Any:
    """What the result says of the recoveries."""
    assert ended.code == 0, ended.err
    found = ended.json("result.json")["recoveries"]
    assert found["count"] == count, (found, ended.err)
    assert f"{count} recover" in ended.err
    return found["of"]


def back(launch: Launch, times: int = 1) -> None:
    """So many lost ranks have joined again, and that was told."""
    launch.wait_for("joined", times)
    assert eventually(lambda: launch.err.count("back after") >= times), launch.err


def test_rank_zero_and_another_at_once(site: Site) -> None:
    with running(site, LONG, "late", "2") as launch:
        for host, rank in (("n1", 0), ("n3", 2)):
            os.kill(site.pid(host, rf"rank {rank} of 3"), signal.SIGKILL)
        launch.wait_for("joined", times=2)
        ended = over(site, launch)
    assert sum(len(one["who"]) for one in ended.json("result.json")["recoveries"]["of"]) == 2
    assert ended.events("regroup")[-1]["members"] == [1, 0, 2]


def test_a_fork_server(site: Site) -> None:
    """Of the first node: the store dies with it, and is opened elsewhere."""
    with running(site, LONG) as launch:
        os.kill(site.pid("n1", "forkserver"), signal.SIGKILL)
        back(launch)
        ended = over(site, launch)
    (one,) = recovered(ended)
    assert "fork server" in one["why"]
    ports = {line.split()[-1] for line in ended.lines(1) if line.startswith("group")}
    assert len(ports) == 1
    assert ports != {str(ended.json("plan.json")["master"]["port"])}


@pytest.mark.parametrize(("host", "what"), [("n1", "agent"), ("n2", "guard")])
def test_an_agent_or_its_guard(site: Site, host: str, what: str) -> None:
    pattern = "import select,sys;" if what == "agent" else " guard "
    with running(site, LONG) as launch:
        os.kill(site.pid(host, pattern), signal.SIGKILL)
        back(launch)
        ended = over(site, launch)
    (one,) = recovered(ended)
    assert "killed" in one["why"]


def test_a_node_without_power_that_comes_back(site: Site) -> None:
    with running(site, LONG) as launch:
        site.lab.fault("power-off", "n2")
        assert eventually(lambda: "Training went on" in launch.err), launch.err
        time.sleep(1)
        site.lab.heal()
        back(launch)
        ended = over(site, launch)
    (one,) = recovered(ended)
    assert "n2: silent for" in one["why"]
    assert "rank 1 on n2 is back" in ended.err


def test_a_short_flap_is_survived_without_any_action(site: Site) -> None:
    with running(site, "5") as launch:
        site.lab.fault("unplug", "n2")
        time.sleep(0.5)
        site.lab.heal()
        ended = launch.end()
    assert ended.code == 0
    assert ended.events("regroup") == []


def test_a_pulled_cable(site: Site) -> None:
    with running(site, LONG) as launch:
        site.lab.fault("unplug", "n3")
        time.sleep(5)
        site.lab.heal()
        back(launch)
        ended = over(site, launch)
    recovered(ended)


def test_a_frozen_rank(site: Site) -> None:
    with running(site, LONG) as launch:
        os.kill(site.pid("n2", r"rank 1 of 3"), signal.SIGSTOP)
        back(launch)
        ended = over(site, launch)
    (one,) = recovered(ended)
    assert "SIGSTOP" in one["why"]
    assert "rank 1 on n2 stood still, stopped by a signal (SIGSTOP): it was ended" in ended.err


def test_too_few_nodes_wait(site: Site) -> None:
    with running(site, "--nnodes", "3", "member.py", LONG) as launch:
        site.lab.fault("power-off", "n2")
        assert eventually(lambda: "too few nodes are left: waiting for n2" in launch.err)
        time.sleep(1)
        assert "regroup" not in (launch.directory / "events.jsonl").read_text()
        site.lab.heal()
        back(launch)
        site.lab.fault("power-off", "n2")  # and Ctrl-C while they wait again
        assert eventually(lambda: launch.err.count("too few nodes are left") == 2), launch.err
        launch.signal(signal.SIGINT)
        ended = launch.end()
    assert ended.code == 130
    assert ended.out.count("saved at") == 2


def test_in_vain_they_save_and_stop(site: Site) -> None:
    with running(site, "--nnodes", "3", "--wait-for-nodes", "2", "member.py", LONG) as launch:
        site.lab.fault("power-off", "n2")
        ended = launch.end()
    assert ended.code == 1
    assert ended.out.count("saved at") == 2
    assert "failed first: n2: " in ended.err
    assert "to resume:" in ended.err


def test_an_exception_is_the_program_s_own(site: Site) -> None:
    with running(site, LONG, "fails", "1") as launch:
        ended = launch.end()
    assert ended.code == 1
    assert "failed first: rank 1 on n2: ValueError: boom" in ended.err


def test_an_exception_right_after_a_loss_is_the_program_s_own_too(site: Site) -> None:
    """The others went on without the lost host: it is no reason to begin anew."""
    with running(site, "--nnodes", "1:3", "member.py", LONG, "bereft", "0") as launch:
        site.lab.fault("power-off", "n3")
        ended = launch.end()
    assert ended.code == 1
    assert "failed first: rank 0 on n1: ValueError: boom" in ended.err
    assert len(ended.events("started")) == 1


def test_an_exception_that_may_pass(site: Site) -> None:
    with running(site, "--max-restarts", "1", "member.py", LONG, "fails", "1") as launch:
        back(launch)
        ended = over(site, launch)
    (one,) = recovered(ended)
    assert "ValueError: boom" in one["why"]


def test_all_ranks_at_once(site: Site) -> None:
    """Newcomers that were ordered between the first end and the last trouble no further start."""
    words = ("--nnodes", "1", "-p", "3", "--max-restarts", "1", "member.py", "3")
    with running(site, *words) as launch:
        pids = [site.pid("n1", rf"rank {rank} of 3") for rank in range(3)]
        for signum in (signal.SIGSTOP, signal.SIGKILL):  # none goes on while others are killed
            for pid in pids:
                os.kill(pid, signum)
        ended = launch.end()
    assert ended.code == 0, ended.err
    assert ended.err.count("starting all nodes again, 1 of 1") == 1
    assert "SIGTERM" not in ended.err
    assert [one["attempt"] for one in ended.events("started")] == [0, 1]
    assert "recoveries" not in ended.json("result.json")


def test_who_cannot_recover_ends_as_ever(site: Site) -> None:
    with running(site, LONG, "unable", "0") as launch:
        os.kill(site.pid("n2", r"rank 1 of 3"), signal.SIGKILL)
        ended = launch.end()
    assert ended.code == 137
    assert "failed first: rank 1 on n2: killed by SIGKILL" in ended.err


def test_a_newcomer_that_fails_is_left_out(site: Site) -> None:
    with running(site, LONG, "short", "1") as launch:
        os.kill(site.pid("n2", r"rank 1 of 3"), signal.SIGKILL)
        assert eventually(lambda: "could not join again" in launch.err), launch.err
        ended = over(site, launch)
    recovered(ended)
    assert "rank 1 on n2 could not join again (ValueError: not again): left out" in ended.err
    assert [(one["host"], one["rank"], one["why"]) for one in ended.events("newcomer lost")] == [
        ("n2", 1, "ValueError: not again")
    ] * 3


def test_losses_again_and_again(site: Site) -> None:
    with running(site, LONG) as launch:
        for number, (host, rank) in enumerate((("n2", 1), ("n1", 0), ("n3", 2), ("n2", 1))):
            os.kill(site.pid(host, rf"rank {rank} of 3"), signal.SIGKILL)
            back(launch, number + 1)
        ended = over(site, launch)
    assert recovered(ended, 4)[0]["who"] == ["rank 1 on n2"]
    assert re.search(
        r"rank 1 on n2 was killed by SIGKILL.*\. Training went on with the other 2 ranks after"
        r" \d+\.\d s; no step was lost", ended.err,
    )  # fmt: skip
    assert re.search(r"rank 1 on n2 is back after", ended.err)
    groups = ended.events("regroup")
    assert [(g["generation"], g["members"], g["planned"]) for g in groups][:2] == [
        (1, [0, 2], False), (2, [0, 2, 1], True),
    ]  # fmt: skip
    log = (ended.directory / "logs/n2/1.log").read_text()
    assert log.index("began") < log.index("joined") < log.index("ended")
