"""The first failure is found among its echoes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.launch import failure_analysis
from paceline.spec.events import Event
from paceline.spec.failure import (
    Failure,
    Kind,
    Result,
    describe_end,
    signal_name,
    unreachable_peer,
)


def failure(rank: int | None, time: float, headline: str = "", kind: Kind = "exception",
            host: str = "", **more: Any) -> Failure:  # fmt: skip
    return Failure(kind, host or f"n{rank}", rank, time, headline=headline, **more)


def left_for(host: str, reason: str, why: str, time: float) -> Failure | None:
    """What it means that an agent leaves."""
    event = Event("leaving", host, None, time, {"reason": reason, "why": why})
    return failure_analysis.failure_of(event, lease_s=10.0)


ECHOES = [
    "RuntimeError: [../third_party/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
    "[10.77.0.11]:31337",
    "RuntimeError: Connection reset by peer",
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Read error "
    "[10.77.0.11]:27522: Software caused connection abort",
    "RuntimeError: writev [10.77.0.11]:27522: Network is down",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
    "RuntimeError: Gloo connectFullMesh failed with timed out",
    "RuntimeError: Application timeout caused pair closure",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "RuntimeError: NCCL communicator was aborted on rank 1.",
]


@pytest.mark.parametrize("echo", ECHOES)
def test_a_cause_goes_before_an_earlier_echo(echo: str) -> None:
    cause = failure(1, 5.0, "ValueError: boom")
    assert failure_analysis.first_failure([failure(0, 4.9, echo), cause]) == cause


def test_the_earliest_cause_wins() -> None:
    early, late = failure(3, 1.0, "ValueError: a"), failure(2, 1.2, "ValueError: b")
    assert failure_analysis.first_failure([late, early]) == early


def test_of_echoes_alone_the_earliest_is_named() -> None:
    one, two = failure(0, 1.0, ECHOES[0]), failure(1, 2.0, ECHOES[1])
    assert failure_analysis.first_failure([two, one]) == one


def test_a_signal_or_a_loss_is_never_an_echo() -> None:
    killed = failure(1, 9.0, "killed by SIGKILL", "signal", signal=9)
    lost = failure(None, 9.5, "the connection to n2 ended: Connection closed by peer", "lost", "n2")
    assert failure_analysis.first_failure([failure(0, 1.0, ECHOES[0]), killed]) == killed
    assert failure_analysis.first_failure([failure(0, 1.0, ECHOES[0]), lost]) == lost


def test_an_exception_and_its_exit_are_one_failure() -> None:
    told = failure(1, 1.0, "ValueError: boom", traceback="Traceback …")
    left = failure(1, 1.1, "exit status 3", "exit", code=3)
    (merged,) = failure_analysis.merge([left, told])
    assert (merged.headline, merged.code, merged.status) == ("ValueError: boom", 3, 3)
    assert merged.traceback


def test_the_status_that_a_rank_tells_counts_where_it_is_ended_before_it_gives_it() -> None:
    said = {"type": "SettingError", "message": "no host n9", "traceback": "  found: …", "code": 2}
    told = failure_analysis.failure_of(Event("exception", "n1", 1, 1.0, said), lease_s=10.0)
    assert told is not None
    stopped = failure(1, 1.7, "killed by SIGTERM", "signal", signal=15)
    (merged,) = failure_analysis.merge([told, stopped])
    assert (merged.headline, merged.status) == ("SettingError: no host n9", 2)


def test_ranks_of_the_same_number_on_two_hosts_are_two() -> None:
    assert len(failure_analysis.merge([failure(0, 1, host="a"), failure(0, 2, host="b")])) == 2


@pytest.mark.parametrize(
    ("more", "status"),
    [({"signal": 9}, 137), ({"signal": 11}, 139), ({"code": 7}, 7), ({}, 1), ({"code": 0}, 1)],
)
def test_the_status_a_shell_would_give(more: dict[str, int], status: int) -> None:
    assert failure(0, 0.0, **more).status == status


def test_echoes_are_waited_for_longer() -> None:
    echo, cause = failure(0, 1.0, ECHOES[0]), failure(1, 1.0, "ValueError")
    assert failure_analysis.settling_delay_s([echo]) > failure_analysis.settling_delay_s(
        [echo, cause]
    )


def test_ends_in_words() -> None:
    assert describe_end(7, None) == "exit status 7"
    assert describe_end(None, 11) == "killed by SIGSEGV"
    assert "OOM killer" in describe_end(None, 9)
    assert signal_name(250) == "signal 250"
    assert failure(1, 0.0, "ValueError: x", host="n2").describe() == "rank 1 on n2: ValueError: x"
    assert failure(None, 0.0, "gone", "lost", "n2").describe() == "n2: gone"


def test_nodes_that_ended_their_ranks_while_we_were_away_are_not_to_blame() -> None:
    left = left_for("n1", "lease", "the launcher was silent for 7 s of a lease of 10 s", 7.0)
    assert left is not None
    after = [left, failure(0, 7.1, "killed by SIGTERM", "signal", signal=15)]
    us = failure_analysis.first_failure(
        failure_analysis.attribute_launcher_pause(after, 20.4, 10.0)
    )
    assert us.kind == "launcher"
    assert us.describe() == (
        "this launcher was stopped for 20 s, longer than the lease of 10 s; "
        "the nodes ended their ranks"
    )
    assert "longer" not in failure_analysis.attribute_launcher_pause(after, 8.0, 10.0)[0].describe()
    # we were there: then the network was not
    assert (
        failure_analysis.first_failure(failure_analysis.attribute_launcher_pause(after, 0.0, 10.0))
        == left
    )
    # what failed before has failed by itself
    own = failure(1, 5.0, "ValueError: boom")
    assert (
        failure_analysis.first_failure(
            failure_analysis.attribute_launcher_pause([own, *after], 20.0, 10.0)
        )
        == own
    )


def test_what_every_rank_raises_belongs_to_the_one_that_met_it() -> None:
    there = failure(0, 1.0, "Stopped: stopped on SIGTERM", origin=1)
    here = failure(1, 1.1, "Stopped: stopped on SIGTERM", origin=1)
    assert failure_analysis.first_failure([there, here]) == here


def test_an_end_in_order_is_to_blame_where_only_echoes_follow() -> None:
    early = failure(1, 1.01, "ended with status 0", "early", code=0)
    late = failure(2, 9.0, "ended with status 0", "early", code=0)
    echo = failure(0, 1.0, ECHOES[0])
    left = failure(0, 1.1, "exit status 1", "exit", code=1)
    assert (
        failure_analysis.first_failure(
            failure_analysis.attribute_early_end([echo, left], [late, early])
        ).rank
        == 1
    )
    own = failure(0, 1.0, "ValueError: boom")
    assert (
        failure_analysis.first_failure(failure_analysis.attribute_early_end([own], [early])) == own
    )


def test_an_agent_that_leaves_for_its_guard_is_named() -> None:
    left = left_for("n2", "guard", "its guard was killed", 1.0)
    assert left is not None
    assert left.describe() == "n2: its guard was killed; the agent ended its ranks"
    assert left_for("n2", "bye", "the launcher said so", 1.0) is None


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (None, "killed by SIGKILL (the kernel's OOM killer, or kill -9)"),
        ({"kills": None, "limit": None, "kernel": []}, "OOM killer, or kill"),
        (
            {
                "kills": None,
                "limit": None,
                "kernel": ["Memory cgroup out of memory: Killed process 9", "oom_reaper: reaped"],
            },
            "OOM killer, or kill",  # another group's limit was reached
        ),
        ({"kills": 0, "limit": None, "kernel": []}, "somebody's kill -9: the kernel's OOM"),
        ({"kills": 0, "limit": None, "kernel": ["Killed process 7"]}, "OOM killer, or kill"),
        (
            {"kills": 1, "kernel": [], "limit": {"bytes": 2 << 30, "peak": 3 << 29, "group": "/g"}},
            "killed by the kernel for its memory at 1.0 GiB (limit 2.0 GiB, peak 1.5 GiB, "
            "control group /g)",
        ),
        (
            {"kills": None, "kernel": ["Killed process 7"], "limit": None},
            "for its memory at 1.0 GiB (the host's memory was used up)",
        ),
    ],
)
def test_who_killed_in_words(memory: dict[str, Any] | None, words: str) -> None:
    assert words in describe_end(None, 9, memory, 1 << 30)


def test_what_is_written_is_what_is_read() -> None:
    """``result.json`` and the value in memory explain the same."""
    failed = failure(1, 0.0, "ValueError: x", code=3, traceback="Traceback …", host="n2")
    result = Result(3, failed)
    assert Result.from_json({"exit_code": 3, **json.loads(json.dumps(result.to_json()))}) == result
    told = Result(1, error="paceline: no")
    assert Result.from_json({"exit_code": 1, **told.to_json()}) == told


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"exit_code": "1", "first_failure": [], "interrupted": True},
        {"exit_code": None, "first_failure": {"kind": "x", "host": 5}, "interrupted": 10**30},
        {"first_failure": {"host": "n1"}, "error": 5},
    ],
)
def test_a_result_that_nobody_would_write_counts_as_none(said: dict[str, Any]) -> None:
    assert Result.from_json(said) == Result()


GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] "


@pytest.mark.parametrize(
    "why", ["Connection timed out", "No route to host", "Network is unreachable"]
)
def test_a_line_that_is_gone_is_an_echo_in_gloo_s_words_only(why: str) -> None:
    said = (
        f"{GLOO}Read error [10.77.0.13]:12957: {why}. This is typically caused by a remote worker"
    )
    assert failure(1, 0.0, said).is_secondary
    assert unreachable_peer(said) == "10.77.0.13"
    for own in (f"TimeoutError: [Errno 110] {why}", f"URLError: <urlopen error [Errno 101] {why}>",
                f"OSError: read error [10.0.0.1]: {why}"):  # fmt: skip
        assert not failure(1, 0.0, own).is_secondary
        assert not unreachable_peer(own)


@pytest.mark.parametrize(
    ("said", "peer"),
    [
        ("writev [fd00::2]:4011: No route to host", "fd00::2"),
        ("Connect timeout [10.0.0.2]:6550$2", "10.0.0.2"),
        ("SO_ERROR: Connection timed out, remote=[10.0.0.2]:6550$2", "10.0.0.2"),
        ("The client socket has timed out after 500ms while trying to connect to (10.0.0.1, 2950).",
         "10.0.0.1"),
        ("Connection closed by peer [10.0.0.2]:42183", ""),
        ("timed out connecting: SO_ERROR: Connection reset by peer, remote=[10.0.0.2]:6550$2", ""),
    ],
)  # fmt: skip
def test_whom_a_rank_could_not_hear(said: str, peer: str) -> None:
    assert unreachable_peer(GLOO + said) == peer
