"""Tests finding the first failure among those that follow from it."""

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
            host: str = "", **details: Any) -> Failure:  # fmt: skip
    return Failure(kind, host or f"n{rank}", rank, time, headline=headline, **details)


def leaving_failure(host: str, reason: str, why: str, time: float) -> Failure | None:
    """Returns the failure that an agent's departure stands for."""
    event = Event("leaving", host, None, time, {"reason": reason, "why": why})
    return failure_analysis.failure_of(event, lease_s=10.0)


SECONDARY_ERRORS = [
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


@pytest.mark.parametrize("echo", SECONDARY_ERRORS)
def test_first_failure_prefers_cause_over_secondary_failure(echo: str) -> None:
    cause = failure(1, 5.0, "ValueError: boom")
    assert failure_analysis.first_failure([failure(0, 4.9, echo), cause]) == cause


def test_first_failure_is_earliest_cause() -> None:
    early, late = failure(3, 1.0, "ValueError: a"), failure(2, 1.2, "ValueError: b")
    assert failure_analysis.first_failure([late, early]) == early


def test_first_failure_is_earliest_secondary_failure() -> None:
    earlier, later = failure(0, 1.0, SECONDARY_ERRORS[0]), failure(1, 2.0, SECONDARY_ERRORS[1])
    assert failure_analysis.first_failure([later, earlier]) == earlier


def test_signal_or_loss_is_never_secondary() -> None:
    killed = failure(1, 9.0, "killed by SIGKILL", "signal", signal=9)
    lost = failure(None, 9.5, "the connection to n2 ended: Connection closed by peer", "lost", "n2")
    assert failure_analysis.first_failure([failure(0, 1.0, SECONDARY_ERRORS[0]), killed]) == killed
    assert failure_analysis.first_failure([failure(0, 1.0, SECONDARY_ERRORS[0]), lost]) == lost


def test_merge_joins_exception_and_exit() -> None:
    reported = failure(1, 1.0, "ValueError: boom", traceback="Traceback …")
    departure = failure(1, 1.1, "exit status 3", "exit", code=3)
    (merged,) = failure_analysis.merge([departure, reported])
    assert (merged.headline, merged.code, merged.status) == ("ValueError: boom", 3, 3)
    assert merged.traceback


def test_merge_prefers_reported_code_over_sigterm() -> None:
    raw = {"type": "SettingError", "message": "no host n9", "traceback": "  found: …", "code": 2}
    reported = failure_analysis.failure_of(Event("exception", "n1", 1, 1.0, raw), lease_s=10.0)
    assert reported is not None
    stopped = failure(1, 1.7, "killed by SIGTERM", "signal", signal=15)
    (merged,) = failure_analysis.merge([reported, stopped])
    assert (merged.headline, merged.status) == ("SettingError: no host n9", 2)


def test_merge_separates_hosts() -> None:
    assert len(failure_analysis.merge([failure(0, 1, host="a"), failure(0, 2, host="b")])) == 2


@pytest.mark.parametrize(
    ("details", "status"),
    [({"signal": 9}, 137), ({"signal": 11}, 139), ({"code": 7}, 7), ({}, 1), ({"code": 0}, 1)],
)
def test_failure_status_follows_shell_convention(details: dict[str, int], status: int) -> None:
    assert failure(0, 0.0, **details).status == status


def test_settling_delay_is_longer_for_secondary_failures() -> None:
    echo, cause = failure(0, 1.0, SECONDARY_ERRORS[0]), failure(1, 1.0, "ValueError")
    assert failure_analysis.settling_delay_s([echo]) > failure_analysis.settling_delay_s(
        [echo, cause]
    )


def test_exit_after_secondary_exception_is_secondary() -> None:
    echo = failure(0, 1.0, SECONDARY_ERRORS[0])
    end = failure(0, 1.1, "exit status 1", "exit")
    assert failure_analysis.are_secondary([echo, end])
    assert not failure_analysis.are_secondary([echo, end, failure(1, 1.2, "exit status 1", "exit")])
    assert not failure_analysis.are_secondary([echo, failure(None, 1.2, "silent", "lost", "n2")])


def test_describes_rank_end() -> None:
    assert describe_end(7, None) == "exit status 7"
    assert describe_end(None, 11) == "killed by SIGSEGV"
    assert "OOM killer" in describe_end(None, 9)
    assert signal_name(250) == "signal 250"
    assert failure(1, 0.0, "ValueError: x", host="n2").describe() == "rank 1 on n2: ValueError: x"
    assert failure(None, 0.0, "gone", "lost", "n2").describe() == "n2: gone"


def test_blames_paused_launcher_for_expired_lease() -> None:
    departure = leaving_failure(
        "n1", "lease", "the launcher was silent for 7 s of a lease of 10 s", 7.0
    )
    assert departure is not None
    after = [departure, failure(0, 7.1, "killed by SIGTERM", "signal", signal=15)]
    blamed = failure_analysis.first_failure(
        failure_analysis.attribute_launcher_pause(after, 20.4, 10.0)
    )
    assert blamed.kind == "launcher"
    assert blamed.describe() == (
        "this launcher was stopped for 20 s, longer than the lease of 10 s; "
        "the nodes ended their ranks"
    )
    assert "longer" not in failure_analysis.attribute_launcher_pause(after, 8.0, 10.0)[0].describe()
    # if the launcher was not paused, the network failed
    assert (
        failure_analysis.first_failure(failure_analysis.attribute_launcher_pause(after, 0.0, 10.0))
        == departure
    )
    # an earlier failure is no consequence
    own = failure(1, 5.0, "ValueError: boom")
    assert (
        failure_analysis.first_failure(
            failure_analysis.attribute_launcher_pause([own, *after], 20.0, 10.0)
        )
        == own
    )


def test_first_failure_is_at_origin_rank() -> None:
    copied = failure(0, 1.0, "Stopped: stopped on SIGTERM", origin=1)
    original = failure(1, 1.1, "Stopped: stopped on SIGTERM", origin=1)
    assert failure_analysis.first_failure([copied, original]) == original


def test_blames_early_end_if_only_secondary_failures_follow() -> None:
    early = failure(1, 1.01, "ended with status 0", "early", code=0)
    late = failure(2, 9.0, "ended with status 0", "early", code=0)
    echo = failure(0, 1.0, SECONDARY_ERRORS[0])
    departure = failure(0, 1.1, "exit status 1", "exit", code=1)
    assert (
        failure_analysis.first_failure(
            failure_analysis.attribute_early_end([echo, departure], [late, early])
        ).rank
        == 1
    )
    own = failure(0, 1.0, "ValueError: boom")
    assert (
        failure_analysis.first_failure(failure_analysis.attribute_early_end([own], [early])) == own
    )


def test_names_agent_whose_guard_was_killed() -> None:
    departure = leaving_failure("n2", "guard", "its guard was killed", 1.0)
    assert departure is not None
    assert departure.describe() == "n2: its guard was killed; the agent ended its ranks"
    assert leaving_failure("n2", "bye", "the launcher said so", 1.0) is None


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (None, "killed by SIGKILL (the kernel's OOM killer, or kill -9)"),
        ({"kills": None, "limit": None, "kernel": []}, "OOM killer, or kill"),
        (
            {
                "kills": None,
                "limit": None,
                "kernel": ["Memory cgroup out of memory: Killed process 9", "oom_reaper: reaped"],
            },
            "OOM killer, or kill",  # limit of another cgroup
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
def test_describes_sigkill_cause(memory: dict[str, Any] | None, expected: str) -> None:
    assert expected in describe_end(None, 9, memory, 1 << 30)


def test_result_json_round_trip() -> None:
    """``result.json`` and the result in memory must give the same explanation."""
    failed = failure(1, 0.0, "ValueError: x", code=3, traceback="Traceback …", host="n2")
    result = Result(3, failed)
    assert Result.from_json({"exit_code": 3, **json.loads(json.dumps(result.to_json()))}) == result
    reported = Result(1, error="paceline: no")
    assert Result.from_json({"exit_code": 1, **reported.to_json()}) == reported


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"exit_code": "1", "first_failure": [], "interrupted": True},
        {"exit_code": None, "first_failure": {"kind": "x", "host": 5}, "interrupted": 10**30},
        {"first_failure": {"host": "n1"}, "error": 5},
    ],
)
def test_malformed_result_is_empty(raw: dict[str, Any]) -> None:
    assert Result.from_json(raw) == Result()


GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] "


@pytest.mark.parametrize(
    "why", ["Connection timed out", "No route to host", "Network is unreachable"]
)
def test_network_error_is_secondary_only_from_gloo(why: str) -> None:
    raw = f"{GLOO}Read error [10.77.0.13]:12957: {why}. This is typically caused by a remote worker"
    assert failure(1, 0.0, raw).is_secondary
    assert unreachable_peer(raw) == "10.77.0.13"
    for own in (f"TimeoutError: [Errno 110] {why}", f"URLError: <urlopen error [Errno 101] {why}>",
                f"OSError: read error [10.0.0.1]: {why}"):  # fmt: skip
        assert not failure(1, 0.0, own).is_secondary
        assert not unreachable_peer(own)


@pytest.mark.parametrize(
    ("raw", "peer"),
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
def test_unreachable_peer(raw: str, peer: str) -> None:
    assert unreachable_peer(GLOO + raw) == peer


@pytest.mark.parametrize(
    ("original", "described"),
    [
        ("ValueError: bad sample 5", "ValueError: bad sample 5"),
        ("data.parts.ValueError: two\nlines", "data.parts.ValueError: two"),
        ("ValueError", "ValueError"),
    ],
)
def test_exception_of_data_worker_is_described_in_one_line(original: str, described: str) -> None:
    message = "ValueError: Caught ValueError in DataLoader worker process 0.\nOriginal Traceback "
    message += f'(most recent call last):\n  File "t.py", line 6\n    raise it\n{original}'
    text = failure(1, 2.0, message).describe()
    assert text == f"rank 1 on n1: {described} (in DataLoader worker process 0)"
