"""Tests the detection of hangs, and of states that only look like hangs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from each_case import each_case
from paceline.cli.runs.describe import describe_ranks
from paceline.explain.conclusion import conclude
from paceline.explain.evidence import Evidence
from paceline.explain.rules import load_all
from paceline.explain.stacks import RankStack, describe_position, is_waiting
from paceline.explain.units import Frame
from paceline.launch.health import hangs, heartbeats
from paceline.launch.health.hang_verdict import (
    BUSY_TIMEOUT_S,
    BlockingCall,
    Child,
    Hang,
    RankSnapshot,
    describe_frozen,
    diagnose,
    first_difference,
    persists,
)
from paceline.launch.health.hangs import POLL_S, HangWatch
from paceline.launch.health.heartbeats import Beat, HeartbeatStats, describe_phases, positions_json
from paceline.launch.nodes.fleet import Fleet
from paceline.spec.events import Event
from paceline.spec.failure import Result

ALL_REDUCE = (
    Frame("/v/site-packages/torch/distributed/distributed_c10d.py", 2800, "all_reduce"),
    Frame("/home/me/train.py", 40, "step"),
)
BACKWARD = (
    Frame("/v/site-packages/torch/autograd/graph.py", 979, "_engine_run_backward"),
    Frame("/home/me/train.py", 39, "<module>"),
)
ASLEEP = (Frame("/home/me/train.py", 21, "fetch"),)


def snapshot(
    rank: int, frames: tuple[Frame, ...], cpu_s: float = 1.0, state: str = "S"
) -> RankSnapshot:
    return RankSnapshot(RankStack(f"n{rank + 1}", rank, state, frames), cpu_s)


def diagnose_pair(
    before: list[RankSnapshot], after: list[RankSnapshot], silent_s: float = 8.0, **options: Any
) -> Hang | None:
    return diagnose(before, after, 2.0, silent_s, **options)


@pytest.mark.parametrize("wait", [ALL_REDUCE, BACKWARD])
def test_blames_stuck_rank_while_peers_wait(wait: tuple[Frame, ...]) -> None:
    looks = [snapshot(0, wait), snapshot(1, ASLEEP)]
    verdict = diagnose_pair(looks, looks)
    assert verdict is not None
    assert (verdict.host, verdict.rank) == ("n2", 1)
    assert verdict.text.startswith("rank 1 on n2 is stuck at train.py, line 21, in fetch while")
    assert "rank 0 on n1 waits for it in" in verdict.text


@pytest.mark.parametrize(
    "folder",
    [
        "/home/me/.cache/paceline/jobs/d0846f4f1393-0480a93d/code",  # sent to the host
        "/home/me/paceline",
        "/home/me/src/paceline/train",
        "/home/me/paceline/paceline",
    ],
)
def test_script_in_folder_named_paceline_is_user_code(folder: str) -> None:
    torch, script = ALL_REDUCE
    waits = (torch, replace(script, file=f"{folder}/hang.py"))
    looks = [snapshot(0, waits), snapshot(1, (Frame(f"{folder}/hang.py", 3, "load_batch"),))]
    verdict = diagnose_pair(looks, looks)
    assert verdict is not None
    assert verdict.text.startswith("rank 1 on n2 is stuck at hang.py, line 3, in load_batch")
    assert "all_reduce (hang.py, line 40, in step)" in verdict.text


@pytest.mark.parametrize(
    "file",
    [
        "/v/site-packages/paceline/train/session.py",
        "/opt/clone/src/paceline/train/session.py",
        "/home/me/.cache/paceline/jobs/0123/paceline/paceline/train/reduce/direct.py",  # a recipe
        str(Path(hangs.__file__).parents[2] / "recipes/__init__.py"),
        "/home/me/.cache/paceline/agent/0123/paceline_agent/entry.py",
    ],
)
def test_script_frame_skips_paceline_code(file: str) -> None:
    script = Frame("/home/me/paceline/train.py", 3, "main")
    assert RankStack("n1", 0, "S", (Frame(file, 5, "wait"), script)).script_frame == script


def test_busy_rank_is_reported_after_busy_timeout() -> None:
    before = [snapshot(0, ALL_REDUCE), snapshot(1, ASLEEP, 1.0)]
    after = [snapshot(0, ALL_REDUCE), snapshot(1, ASLEEP, 2.9)]
    assert diagnose_pair(before, after) is None
    verdict = diagnose_pair(before, after, BUSY_TIMEOUT_S + 1)
    assert verdict is not None
    assert "rank 1 on n2 is busy at train.py, line 21" in verdict.text


def test_disk_activity_counts_as_busy() -> None:
    """Writing a checkpoint to a slow disk uses almost no CPU time."""
    still = snapshot(1, ASLEEP)
    written = RankSnapshot(still.stack, still.cpu_s, moved=1e6)
    waiting = snapshot(0, ALL_REDUCE)
    on_disk = snapshot(1, ASLEEP, state="D")
    for before, after in ((still, written), (on_disk, on_disk)):
        assert diagnose_pair([waiting, before], [waiting, after]) is None
        assert diagnose_pair([waiting, before], [waiting, after], BUSY_TIMEOUT_S + 1) is not None
    assert (
        diagnose_pair([waiting, still], [waiting, RankSnapshot(still.stack, 1.0, moved=4096)])
        is not None
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            [snapshot(0, ASLEEP), snapshot(1, ASLEEP)],
            [snapshot(0, ASLEEP), snapshot(1, ASLEEP)],
        ),  # no rank waits
        (
            [snapshot(0, ALL_REDUCE), snapshot(1, ASLEEP)],
            [snapshot(0, ASLEEP), snapshot(1, ASLEEP)],
        ),
        (
            [snapshot(0, ALL_REDUCE), snapshot(1, ())],
            [snapshot(0, ALL_REDUCE), snapshot(1, ())],
        ),  # stack unknown
        (
            [snapshot(0, ALL_REDUCE, 1.0), snapshot(1, ALL_REDUCE)],
            [snapshot(0, ALL_REDUCE, 2.5), snapshot(1, ALL_REDUCE)],  # traffic
        ),
        (
            [snapshot(0, ALL_REDUCE), snapshot(1, ASLEEP)],
            [snapshot(0, ALL_REDUCE), snapshot(1, (Frame("/home/me/train.py", 22, "fetch"),))],
        ),
        ([], []),
        ([snapshot(0, ALL_REDUCE)], [snapshot(0, ALL_REDUCE), snapshot(1, ASLEEP)]),
        ([snapshot(0, ALL_REDUCE)], [snapshot(0, ALL_REDUCE)]),
        # a rank has appeared or disappeared, and the others may wait for it
        (
            [snapshot(0, ALL_REDUCE), snapshot(1, ALL_REDUCE), snapshot(2, ASLEEP)],
            [snapshot(0, ALL_REDUCE), snapshot(1, ALL_REDUCE)],
        ),
        # stopped for a moment, for example by a debugger
        (
            [snapshot(0, ALL_REDUCE), snapshot(1, ALL_REDUCE)],
            [snapshot(0, ALL_REDUCE), snapshot(1, (), state="t")],
        ),
        # a slow network: data still arrives
        (
            [snapshot(0, BACKWARD), snapshot(1, BACKWARD)],
            [snapshot(0, BACKWARD), replace(snapshot(1, BACKWARD), sent=50_000)],
        ),
    ],
)
def test_ignores_ambiguous_snapshots(before: list[RankSnapshot], after: list[RankSnapshot]) -> None:
    assert diagnose_pair(before, after, 1000.0) is None


@pytest.mark.parametrize("later", [
    [snapshot(0, ALL_REDUCE), snapshot(1, ALL_REDUCE)],
    [snapshot(0, ALL_REDUCE), snapshot(1, (Frame("/home/me/train.py", 22, "fetch"),))],
    [snapshot(0, ALL_REDUCE), snapshot(1, ())],
    [snapshot(0, ALL_REDUCE)],
])  # fmt: skip
def test_progress_in_detailed_snapshot_clears_hang(later: list[RankSnapshot]) -> None:
    """Otherwise, the cause at one time would be reported for the position at another time."""
    looks = [snapshot(0, ALL_REDUCE), snapshot(1, ASLEEP)]
    assert diagnose_pair(looks, looks) is not None
    assert diagnose_pair(looks, looks, detailed=later) is None


def test_names_all_stuck_ranks() -> None:
    looks = [snapshot(0, ALL_REDUCE), snapshot(1, ASLEEP), snapshot(2, (at(30, "load"),))]
    verdict = diagnose_pair(looks, looks)
    assert verdict is not None
    assert verdict.text.endswith("; rank 2 on n3 is stuck, too, at train.py, line 30, in load")


def test_heartbeat_timeout_ignores_hung_intervals() -> None:
    beats = HeartbeatStats()
    for second in range(5):
        beats.take(0, second, "train", float(second))
    beats.take(0, 5, "train", 300.0, hung=True)
    assert beats.timeout_s == pytest.approx(10.0)
    assert beats.limit_s == 30.0


def test_describes_rank_positions() -> None:
    """Formats positions for the progress line and for ``paceline status``."""
    beats = HeartbeatStats()
    for rank in range(3):
        beats.take(rank, 7, "train", 10.0)
    hosts = {rank: f"n{rank + 1}" for rank in range(3)}
    ranks = positions_json(beats.beats, hosts, 11.0)
    assert (describe_phases(ranks), describe_ranks(ranks)) == ("", ["all 3 ranks: step 7, train"])
    beats.take(1, 6, "evaluate", 11.0)
    ranks = positions_json(beats.beats, hosts, 12.0)
    assert describe_phases(ranks) == "rank 1 on n2: evaluate"
    ranks = positions_json(beats.beats, hosts, 20.0)
    assert describe_phases(ranks) == "rank 1 on n2: evaluate  no word for 9 s"
    assert describe_ranks(ranks) == [
        "rank 1 on n2: step 6, evaluate, no word for 9 s",
        "rank 0 on n1, rank 2 on n3: step 7, train, no word for 10 s",
    ]
    for rank in range(3):
        beats.take(rank, 0, "start", 30.0)
    assert describe_phases(positions_json(beats.beats, hosts, 30.0)) == "start"
    assert (describe_phases([]), describe_ranks([])) == ("", [])


def at(line: int, function: str = "<module>", file: str = "/home/me/train.py") -> Frame:
    return Frame(file, line, function)


def test_names_blocking_call() -> None:
    """A rank may wait for a lock, a full pipe, a child process, or a worker that loads data."""
    loop = Frame("/v/site-packages/torch/utils/data/dataloader.py", 1328, "_try_get_data")
    work = Frame("/v/site-packages/torch/utils/data/_utils/worker.py", 349, "_worker_loop")
    queue = Frame("/usr/lib/python3.11/multiprocessing/queues.py", 113, "get")
    yes = Child(77, "yes", BlockingCall("write", "pipe:[5]", (9,)), ())
    idle = Child(78, "pt_data_worker", BlockingCall("poll"), (queue, work))
    stuck = Child(79, "pt_data_worker", BlockingCall("futex"), (at(5, "__getitem__"), work))
    cases = [
        (ASLEEP, BlockingCall("clock_nanosleep"), (), "line 21, in fetch (it sleeps) while"),
        (ASLEEP, BlockingCall("write", "pipe:[4]", (9,)), (),
         "(it writes to a full pipe that nobody else could read) while"),
        (ASLEEP, BlockingCall("wait4"), (yes,),
         "(its child, process 77 (yes), writes to a full pipe that "
         "only rank 1 on n2 could read) while"),
        (ASLEEP, BlockingCall("flock", "/nfs/a.lock"), (),
         "(it waits for a lock on /nfs/a.lock) while"),
        ((loop, at(30)), BlockingCall("poll"), (idle, stuck),
         "waits for its data at train.py, line 30: "
         "its data loader's worker, process 79, is stuck at train.py, line 5, in __getitem__ "
         "(it waits for a lock or a thread) while"),
    ]  # fmt: skip
    for frames, call, children, expected in cases:
        looks = [snapshot(0, ALL_REDUCE), RankSnapshot(snapshot(1, frames).stack, 1.0, pid=9)]
        closely = [looks[0], replace(looks[1], blocking_call=call, children=children)]
        verdict = diagnose_pair(looks, looks, detailed=closely)
        assert verdict is not None
        assert expected in verdict.text
        assert verdict.is_replaceable


def test_context_switches_make_hang_uncertain() -> None:
    rank_stack = snapshot(1, ASLEEP).stack
    before = [snapshot(0, ALL_REDUCE), RankSnapshot(rank_stack, 1.0, switches=10)]
    for switches, is_sure in ((12, True), (40, False)):
        verdict = diagnose_pair(
            before, [snapshot(0, ALL_REDUCE), RankSnapshot(rank_stack, 1.0, switches=switches)]
        )
        assert verdict is not None
        assert verdict.is_certain == is_sure


def test_detects_mismatched_collectives() -> None:
    """With more than two ranks, the deviating one is named, with its calls if they are recorded."""
    extra = (ALL_REDUCE[0], at(50, "extra"))
    three = [snapshot(0, BACKWARD), snapshot(1, extra), snapshot(2, BACKWARD)]
    verdict = diagnose_pair(three, three)
    assert verdict is not None
    assert (verdict.rank, verdict.kind, verdict.is_replaceable) == (1, "apart", False)
    assert verdict.sides == ((0, 2), (1,))
    assert verdict.text == (
        "rank 1 on n2 waits in all_reduce (train.py, line 50, in extra) while rank 0 on n1, rank 2 "
        "on n3 wait in the backward pass (train.py, line 39): they do not wait for the same"
    )
    same = [snapshot(rank, ALL_REDUCE) for rank in range(3)]
    calls = {0: ("0 7 all_reduce of [9]",), 1: ("0 7 all_reduce of [8]",)}
    calls[2] = calls[0]
    closely = [RankSnapshot(sample.stack, 1.0, calls=calls[sample.stack.rank]) for sample in same]
    verdict = diagnose_pair(same, same, detailed=closely)
    assert verdict is not None
    assert verdict.text.startswith("rank 1 on n2 waits in all_reduce (train.py, line 40, in step), "
                                 "its call 7 was all_reduce of [8] while")  # fmt: skip
    assert verdict.text.endswith("they differ from collective 7 on")


GPU_WAIT = (Frame("/home/me/train.py", 44, "log"),)  # loss.item() has no frame of its own


@pytest.mark.parametrize("cpu_s", [1.0, 3.0])  # CUDA may wait by polling or by sleeping
def test_blames_rank_that_did_not_launch_gpu_collective(cpu_s: float) -> None:
    waits = RankSnapshot(RankStack("n1", 0, "S", GPU_WAIT), cpu_s,
                         unfinished="0 47 all_reduce of [8]",
                         calls=("0 46 all_reduce of [9]", "0 47 all_reduce of [8]",
                                "pair 3 barrier"))  # fmt: skip
    asleep = RankSnapshot(snapshot(1, ASLEEP).stack, 1.0, calls=("0 46 all_reduce of [9]",))
    verdict = diagnose_pair([snapshot(0, GPU_WAIT), snapshot(1, ASLEEP)], [waits, asleep],
                   detailed=[waits, asleep])  # fmt: skip
    assert verdict is not None
    assert (verdict.rank, verdict.kind) == (1, "still")
    assert verdict.text == (
        "rank 1 on n2 is stuck at train.py, line 21, in fetch while rank 0 on n1 waits for it "
        "at train.py, line 44, in log until its GPU has completed all_reduce of [8], call 47 of "
        "group 0, which rank 1 on n2 has not launched"
    )


def test_detects_mismatched_gpu_collectives() -> None:
    calls = [f"0 7 all_reduce of [{size}]" for size in (8, 8, 9)]
    snaps = [RankSnapshot(RankStack(f"n{rank + 1}", rank, "S", GPU_WAIT), 1.0,
                          unfinished=call, calls=(call,))
             for rank, call in enumerate(calls)]  # fmt: skip
    verdict = diagnose_pair(snaps, snaps, detailed=snaps)
    assert verdict is not None
    assert (verdict.rank, verdict.kind) == (2, "apart")
    assert verdict.text.endswith("they differ from collective 7 on")


def test_active_gpus_do_not_hang() -> None:
    def gpu(rank: int, call: int, sent: float = 0.0) -> RankSnapshot:
        stack = RankStack(f"n{rank + 1}", rank, "S", GPU_WAIT)
        line = f"0 {call} all_reduce of [8]"
        return RankSnapshot(stack, 1.0, sent=sent, unfinished=line, calls=(line,))

    same = [gpu(0, 7), gpu(1, 7)]  # preceding kernels may be slow
    assert diagnose_pair(same, same, detailed=same) is None
    before, after = [gpu(0, 7), gpu(1, 6)], [gpu(0, 7, sent=1e8), gpu(1, 6, sent=1e8)]
    assert diagnose_pair(before, after, detailed=after) is None
    asleep = RankSnapshot(snapshot(1, ASLEEP).stack, 1.0, calls=("0 6 all_reduce of [8]",))
    went_on = [gpu(0, 8), asleep]
    assert diagnose_pair([gpu(0, 7), asleep], [gpu(0, 7), asleep], detailed=went_on) is None


@pytest.mark.parametrize(
    "call",
    ["", "x", "0 5", "0  ", "0 five all_reduce", "0 \u00b2 all_reduce", "0 -1 a", "0 " + "9" * 190],
)
def test_ignores_malformed_collective_records(call: str) -> None:
    """A script can write to the pipe through which its rank reports its calls."""

    def snap(rank: int, calls: list[str], unfinished: str) -> RankSnapshot:
        return RankSnapshot.from_report("n1", {
            "rank": rank, "state": "S", "cpu_s": 1.0, "pid": 1, "moved": 0, "sent": 0,
            "switches": 0, "call": "", "on": "", "readers": [], "children": [], "calls": calls,
            "unfinished": unfinished, "stack": ['File "/home/me/train.py", line 44 in log'],
        })  # fmt: skip

    good = "0 5 all_reduce of [8]"
    for calls in (([call], [good]), ([good], [call]), ([call], [call])):
        snaps = [snap(0, calls[0], good), snap(1, calls[1], call)]
        verdict = diagnose_pair(snaps, snaps, detailed=snaps)
        assert verdict is not None
        assert verdict.text.startswith("rank 1 on n1 is stuck")
    assert first_difference({0: (call,), 1: (good,)}) is None


def test_first_difference_ignores_missing_calls() -> None:
    assert first_difference({0: ("0 1 barrier", "0 2 barrier"), 1: ("0 1 barrier",)}) is None
    verdict = first_difference({0: ("0 1 a", "0 2 b", "0 3 c"), 1: ("0 2 x", "0 3 y"), 2: ()})
    assert verdict is not None
    assert (verdict.number, verdict.calls) == (2, ((0, "b"), (1, "x")))
    assert first_difference({0: ("nonsense", "")}) is None


def test_describes_frozen_ranks() -> None:
    said = {how: describe_frozen("n2", 1, how, 3.2, "gdb" if how == "traced" else "", 77)
            for how in ("stopped", "traced", "paused", "disk", "swapped")}  # fmt: skip
    assert said["stopped"] == ("rank 1 on n2 is frozen: stopped by a signal for 3 s (SIGSTOP); "
                               "on n2: kill -CONT 77")  # fmt: skip
    assert said["traced"].endswith("held by a debugger for 3 s: gdb")
    assert "control group is paused" in said["paused"]
    assert "a disk that does not answer" in said["disk"]
    assert "waited for its memory" in said["swapped"]


def test_same_collective_from_different_lines_is_no_mismatch() -> None:
    """Typically, only rank 0 has the data: ``if rank == 0: broadcast(x) else: broadcast(y)``."""
    three = [snapshot(0, ALL_REDUCE), *(snapshot(n, (ALL_REDUCE[0], at(50))) for n in (1, 2))]
    called = [replace(sample, calls=("0 7 broadcast of [9]",)) for sample in three]
    verdict = diagnose_pair(three, three, detailed=called)
    assert verdict is not None
    assert (verdict.kind, verdict.rank) == ("deaf", None)
    assert "wait for each other in broadcast of [9], call 7 of each: what one" in verdict.text


def test_earlier_recorded_call_does_not_blame_network() -> None:
    """A session's exchange is not in torch's recorder: its last call is one that all completed."""
    exchange = Frame("/v/site-packages/paceline/train/reduce/direct.py", 263, "_sleep")
    both = [snapshot(0, (exchange, at(14))), snapshot(1, BACKWARD)]
    called = [replace(snap, calls=("0 12 all_gather of [55]",)) for snap in both]
    verdict = diagnose_pair(both, both, detailed=called)
    assert verdict is not None
    assert verdict.kind == "apart"
    assert "does not reach" not in verdict.text


def test_mismatch_does_not_blame_lagging_rank() -> None:
    looks = [snapshot(rank, ALL_REDUCE) for rank in range(5)]
    calls = dict.fromkeys((0, 2, 3), ("0 6 barrier", "0 7 all_reduce of [9]"))
    calls.update({1: ("0 6 barrier",), 4: ("0 6 barrier", "0 7 broadcast of [9]")})
    verdict = diagnose_pair(
        looks, looks, detailed=[replace(sample, calls=calls[sample.stack.rank]) for sample in looks]
    )
    assert verdict is not None
    assert verdict.rank == 4


def test_first_difference_ignores_expected_shape_differences() -> None:
    """Only one rank of a scatter has inputs; for a sum, only the number of elements matters."""
    calls = {0: ("0 2 scatter of [2,3]", "0 3 all_reduce of [2,3]"),
             1: ("0 2 scatter", "0 3 all_reduce of [6]")}  # fmt: skip
    assert first_difference(calls) is None
    verdict = first_difference({0: ("0 2 scatter of [2,3]",), 1: ("0 2 gather of [3]",)})
    assert verdict is not None
    assert first_difference({0: ("0 2 all_reduce of [2],[3]",), 1: ("0 2 all_reduce of [2]",)})


TORCH = "/v/site-packages/torch"
C10D = Frame(f"{TORCH}/distributed/distributed_c10d.py", 2800, "all_reduce")
WRAPPER = Frame(f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper")
DDP_FRAMES = (Frame(f"{TORCH}/nn/modules/module.py", 1751, "_call_impl"),
          Frame(f"{TORCH}/nn/parallel/distributed.py", 1600, "_run_ddp_forward"),
          Frame(f"{TORCH}/nn/parallel/distributed.py", 1640, "forward"))  # fmt: skip
PACELINE = "/v/site-packages/paceline"


@each_case(
    ("frames", "said"),
    [
        ((C10D, WRAPPER, at(40)), "all_reduce (train.py, line 40)"),
        (BACKWARD, "the backward pass (train.py, line 39)"),
        # code of a model or a library inside a DDP or FSDP wrapper
        ((at(7, "forward", "/home/me/net.py"), *DDP_FRAMES, at(40)), ""),
        ((Frame(f"{TORCH}/nn/modules/linear.py", 125, "forward"), *DDP_FRAMES, at(40)), ""),
        ((Frame(f"{PACELINE}/recipes/transformer.py", 80, "forward"), *DDP_FRAMES), ""),
        ((Frame(f"{TORCH}/nn/parallel/distributed.py", 2000, "_sync_buffers"), *DDP_FRAMES, at(40)),
         "forward (train.py, line 40)"),
        ((C10D, WRAPPER, at(9, "forward", "/home/me/net.py"), *DDP_FRAMES, at(40)),
         "all_reduce (net.py, line 9, in forward)"),
        # a checkpoint: writing files, and collectives of its saving
        ((Frame(f"{TORCH}/distributed/checkpoint/filesystem.py", 300, "_write_item"), at(40)), ""),
        ((C10D, WRAPPER, Frame(f"{TORCH}/distributed/checkpoint/utils.py", 9, "all_gather"),
          Frame(f"{TORCH}/distributed/checkpoint/state_dict_saver.py", 9, "save"), at(40)),
         "save (train.py, line 40)"),
        # a session's wait, which can be cancelled
        ((Frame(f"{PACELINE}/train/elastic/waits.py", 106, "wait"),
          Frame(f"{PACELINE}/train/comms.py", 9, "sum"),
          Frame(f"{PACELINE}/train/meter.py", 80, "result"), at(40)), "result (train.py, line 40)"),
        ((Frame(f"{PACELINE}/train/elastic/waits.py", 106, "wait"), *BACKWARD),
         "the backward pass (train.py, line 39)"),
        ((Frame(f"{PACELINE}/train/meter.py", 80, "add"), at(40)), ""),
    ],
)  # fmt: skip
def test_recognizes_waiting_stack(frames: tuple[Frame, ...], said: str) -> None:
    rank_stack = snapshot(0, frames).stack
    assert is_waiting(rank_stack) == bool(said)
    if said:
        assert describe_position(rank_stack) == said


def test_reports_deadlock_of_all_ranks() -> None:
    looks = [snapshot(0, ALL_REDUCE), snapshot(1, ALL_REDUCE)]
    verdict = diagnose_pair(looks, looks)
    assert verdict is not None
    assert verdict.text.startswith(
        "rank 0 on n1, rank 1 on n2 wait for each other in all_reduce (train.py, line 40, in step)"
    )
    other = [snapshot(0, ALL_REDUCE), snapshot(1, BACKWARD)]
    verdict = diagnose_pair(other, other)
    assert verdict is not None
    assert "they do not wait for the same" in verdict.text


def test_blames_rank_that_has_not_regrouped() -> None:
    """After the loss of another rank, the others wait for it in the new group."""
    regrouping = (
        Frame("/v/site-packages/paceline/train/elastic/job_group.py", 825, "_wait_for_members"),
        BACKWARD[1],
    )
    looks = [snapshot(0, BACKWARD), snapshot(1, regrouping), snapshot(2, regrouping)]
    verdict = diagnose_pair(looks, looks)
    assert verdict is not None
    assert (verdict.rank, verdict.kind, verdict.is_replaceable) == (0, "still", True)
    assert "rank 1 on n2, rank 2 on n3 wait for it" in verdict.text


def test_blames_ended_rank_while_peers_wait() -> None:
    looks = [snapshot(0, ALL_REDUCE)]
    verdict = diagnose_pair(looks, looks, ended=[("n2", 1)])
    assert verdict is not None
    assert verdict.text.startswith("rank 1 on n2 ended with status 0 while rank 0 on n1 waits")


def test_reports_stuck_final_rank() -> None:
    """The teardown of torch may hang, or the script may wait, and delay the end of the job."""
    both = [snapshot(1, ASLEEP)], [snapshot(1, ASLEEP)]
    ended = [("n1", 0), ("n3", 2)]
    hang = diagnose_pair(*both, ended=ended)
    assert hang is not None
    assert hang.text.startswith("rank 1 on n2 is stuck at train.py, line 21")
    assert hang.text.endswith(", and all others have ended")
    assert (hang.kind, hang.is_replaceable, persists(hang, both[1])) == ("last", False, True)
    assert diagnose_pair(*both) is None  # no rank has ended: it may sleep on purpose
    assert diagnose_pair(*both, ended=[("n2", 1)]) is None  # a former process of the same rank
    works = [snapshot(1, ASLEEP, cpu_s=1.0)], [snapshot(1, ASLEEP, cpu_s=2.9)]
    assert diagnose_pair(*works, ended=ended) is None


def test_heartbeat_timeout_adapts_to_step_time() -> None:
    beats = HeartbeatStats()
    for second in range(4):
        assert not beats.is_calibrated
        beats.take(0, second, "train", float(second))
    assert beats.is_calibrated
    assert beats.timeout_s == pytest.approx(10.0)
    assert beats.received_at == 3.0
    beats.take(0, 4, "train", 9.0)  # a step took six seconds
    assert beats.timeout_s == pytest.approx(24.0)
    beats.take(1, 4, "evaluate", 10.0)
    assert beats.timeout_s >= 60.0


def test_hang_limit_is_five_times_slowest_interval() -> None:
    beats = HeartbeatStats()
    assert beats.limit_s is None  # a script without heartbeats
    beats.take(0, 0, "train", 0.0)
    assert beats.limit_s == 600.0  # the first steps may include compilation
    for second in range(1, 5):
        beats.take(0, second, "train", float(second))
    assert beats.limit_s == 30.0
    beats.take(0, 5, "train", 24.0)  # writing a checkpoint took 20 s
    assert beats.limit_s == pytest.approx(100.0)
    beats.take(0, 5, "evaluate", 25.0)
    assert beats.limit_s == 600.0  # duration of this phase still unknown
    for second in range(26, 30):
        beats.take(0, 5, "evaluate", float(second))
    assert beats.limit_s == pytest.approx(100.0)


def test_blocked_link_is_reported_once_and_not_after_freeze() -> None:
    hangs: list[Hang | None] = []

    async def scene() -> None:
        fleet = Fleet([], 10.0, lambda *_: None, lambda *_: None)
        watch = HangWatch(
            fleet, lambda hang, _: hangs.append(hang), lambda *_: True, lambda *_: None
        )
        for _ in range(2):
            watch.report_blocked_links("n1 and n2 cannot reach each other")
        frozen = {"how": "disk", "seconds": 5.0, "on": "/data", "pid": 7}
        watch.on_freeze_event(Event("rank frozen", "n2", 1, fields=frozen))
        watch.report_blocked_links("n1 and n2 cannot reach each other")
        await fleet.close()

    asyncio.run(scene())
    assert [hang and (hang.kind, hang.host) for hang in hangs] == [
        ("deaf", ""),
        ("frozen", "n2"),
    ]


def test_forget_host_drops_rank_state() -> None:
    """Otherwise, a new process of the same rank would be ended because the former one hung."""

    async def scene() -> tuple[list[str], dict[int, Beat]]:
        hangs: list[Hang | None] = []
        fleet = Fleet([], 10.0, lambda *_: None, lambda *_: None)
        watch = HangWatch(
            fleet,
            lambda hang, _: hangs.append(hang),
            lambda *_: True,
            lambda *_: None,
            0.01,
        )
        watch.heartbeat("n1", 0, 5, "train")
        watch.heartbeat("n2", 1, 5, "evaluate")
        frozen = {"how": "disk", "seconds": 5.0, "on": "/data", "pid": 7}
        for rank in (1, 2):  # rank 2 has sent no heartbeat
            watch.on_freeze_event(Event("rank frozen", "n2", rank, fields=frozen))
        watch.forget_host("n2")
        hangs.clear()
        watching = asyncio.ensure_future(watch.run())
        await asyncio.sleep(1.5 * POLL_S)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await fleet.close()
        return [hang.text for hang in hangs if hang is not None], watch.heartbeats.beats

    hangs, beats = asyncio.run(scene())
    assert hangs == []
    assert list(beats) == [0]


@dataclass
class Scene:
    """Simulates two ranks of a script without heartbeats; one waits for the other.

    Attributes:
        line: Line at which the other rank is stuck.
        call: Number of the last collective that both began; 0 if not recorded.
        active_at: Time at which a rank last used a CPU.
        answers: Whether the node answers.
        readable: Whether the ranks give their stacks and collectives in time.
        steps: Number of inspections, from the first, each of which sees a new collective.
        hangs: Reports of the watch.
    """

    line: int = 21
    call: int = 7
    active_at: float = field(default_factory=lambda: time.monotonic() - 0.1)
    answers: bool = True
    readable: bool = True
    hangs: list[Hang | None] = field(default_factory=list)
    looks: int = 0
    steps: int = 0
    child_line: int = 0

    async def request(self, op: str, closely: bool = False, **_: Any) -> dict[str, Any]:
        self.looks += op == "seen"
        self.call += self.looks <= self.steps
        if not self.answers:
            raise ConnectionError
        stacks: tuple[tuple[Frame, ...], ...] = ((C10D, at(40)), (at(self.line),))
        calls = [f"0 {self.call} all_reduce of [9]"] if self.call else []
        if not self.readable:
            stacks, calls = ((), ()), []
        children: list[dict[str, Any]] = []
        if self.child_line:
            stacks, calls = ((JOIN, at(50)),) * 2, []
            frames = (C10D, at(self.child_line)) if closely else ()
            lines = [f'File "{f.file}", line {f.line} in {f.function}' for f in frames]
            children = [{"pid": 9, "name": "python", "call": "", "on": "", "readers": [],
                         "stack": lines}]  # fmt: skip
        return {"ranks": [
            {"rank": rank, "state": "S", "cpu_s": 1.0, "pid": rank + 5, "moved": 0, "sent": 0,
             "switches": 0, "call": "", "on": "", "readers": [], "children": children,
             "calls": calls, "unfinished": "",
             "stack": [f'File "{f.file}", line {f.line} in {f.function}' for f in stack]}
            for rank, stack in enumerate(stacks)
        ]}  # fmt: skip

    async def play(self, act: Callable[[HangWatch], Any]) -> None:
        node = SimpleNamespace(name="n1", lost=False, running=True, channel=self, facts={})

        async def tell(*_: Any, **__: Any) -> None:
            node.active_at = self.active_at

        await tell()
        fleet = SimpleNamespace(nodes=[node], tell=tell)
        watch = HangWatch(fleet, lambda hang, _: self.hangs.append(hang),  # type: ignore[arg-type]
                          lambda *_: False, lambda *_: None)  # fmt: skip
        watching = asyncio.ensure_future(watch.run())
        try:
            await self.until(lambda: len(self.hangs) == 1)
            node.active_at = self.active_at
            await act(watch)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def works(self, watch: HangWatch) -> None:
        """Lets a rank use a CPU until the watch makes another report."""
        watch._fleet.nodes[0].active_at = self.active_at = time.monotonic() + 60
        await self.until(lambda: len(self.hangs) == 2)

    async def until(self, so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not so():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)

    def lines(self) -> list[str]:
        return ["" if hang is None else hang.at for hang in self.hangs]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    for name in ("REINSPECT_S", "SNAPSHOT_GAP_S", "CALLS_S", "CLOCK_TOLERANCE_S"):
        monkeypatch.setattr(hangs, name, 0.0)
    monkeypatch.setattr(hangs, "POLL_S", 0.005)
    monkeypatch.setattr(hangs, "MIN_IDLE_S", 0.05)
    return Scene()


def test_hang_after_unseen_progress_is_separate_hang(scene: Scene) -> None:
    """Between two inspections, the job makes progress and hangs again, at any line."""

    async def act(_: HangWatch) -> None:
        scene.call, scene.line = 9, 30
        await scene.until(lambda: len(scene.hangs) == 3)
        scene.call = 10
        await scene.until(lambda: len(scene.hangs) == 5)

    asyncio.run(scene.play(act))
    assert scene.lines() == ["at train.py, line 21", "", "at train.py, line 30", "",
                             "at train.py, line 30"]  # fmt: skip


def test_collective_progress_without_cpu_is_no_hang(scene: Scene) -> None:
    """If each step sleeps for some seconds, all stack dumps look the same."""
    scene.steps = 12

    async def act(_: HangWatch) -> None:
        assert scene.looks > scene.steps

    asyncio.run(scene.play(act))
    assert scene.lines() == ["at train.py, line 21"]


def test_changed_position_updates_hang(scene: Scene) -> None:
    async def act(_: HangWatch) -> None:
        scene.line = 22
        await scene.until(lambda: len(scene.hangs) == 2)

    asyncio.run(scene.play(act))
    assert scene.lines() == ["at train.py, line 21", "at train.py, line 22"]


def test_cpu_use_alone_does_not_end_hang(scene: Scene) -> None:
    """Another thread may write a log; only a new collective shows progress."""

    async def act(watch: HangWatch) -> None:
        for _ in range(3):
            looks, scene.active_at = scene.looks, time.monotonic() + 2
            watch._fleet.nodes[0].active_at = scene.active_at
            await scene.until(lambda: scene.looks > looks)  # noqa: B023
        assert scene.lines() == ["at train.py, line 21"]
        scene.call = 8
        await scene.works(watch)

    asyncio.run(scene.play(act))
    assert scene.hangs[1] is None


def test_busy_host_without_answers_in_time_does_not_end_hang(scene: Scene) -> None:
    async def act(watch: HangWatch) -> None:
        scene.readable = False
        for _ in range(3):
            looks, scene.active_at = scene.looks, time.monotonic() + 2
            watch._fleet.nodes[0].active_at = scene.active_at
            await scene.until(lambda: scene.looks > looks)  # noqa: B023
        assert await watch.diagnose_stop() is not None

    asyncio.run(scene.play(act))
    assert scene.lines() == ["at train.py, line 21"]


def test_cpu_use_at_different_line_ends_hang(scene: Scene) -> None:
    """Ranks of a pipeline exchange data without collectives."""

    async def act(watch: HangWatch) -> None:
        scene.line = 25
        await scene.works(watch)

    asyncio.run(scene.play(act))
    assert scene.hangs[1] is None


def test_cpu_use_ends_hang_without_collective_records(scene: Scene) -> None:
    scene.call = 0

    async def act(watch: HangWatch) -> None:
        await scene.works(watch)

    asyncio.run(scene.play(act))
    assert scene.hangs[1] is None


def test_hang_report_waits_for_unreachable_node(scene: Scene) -> None:
    async def act(watch: HangWatch) -> None:
        scene.answers, scene.line, looks = False, 30, scene.looks
        await scene.until(lambda: scene.looks > looks + 3)
        scene.answers = True
        await scene.until(lambda: len(scene.hangs) == 2)

    asyncio.run(scene.play(act))
    assert scene.lines() == ["at train.py, line 21", "at train.py, line 30"]


JOIN = Frame("/usr/lib/python3.11/multiprocessing/connection.py", 947, "wait")
CHILD = Child(9, "python", BlockingCall(), ALL_REDUCE)
LOADER = Child(8, "python", BlockingCall(), (Frame("/l/multiprocessing/queues.py", 3, "get"),))


@pytest.mark.parametrize(
    ("others", "is_hang"),
    [
        ((CHILD,), True),
        ((CHILD, LOADER, Child(7, "python", BlockingCall(), ())), True),
        ((), False),  # not waiting in a collective
        ((LOADER,), False),
        ((CHILD, Child(7, "python", BlockingCall(), ASLEEP)), False),
        ((CHILD, Child(7, "python", BlockingCall("read", "/data/images"), ())), False),
    ],
)
def test_ranks_hang_if_all_their_processes_wait(others: tuple[Child, ...], is_hang: bool) -> None:
    looks = [snapshot(rank, (JOIN, *ASLEEP)) for rank in (0, 1)]
    closely = [replace(looks[0], children=(CHILD,)), replace(looks[1], children=others)]
    assert diagnose_pair(looks, looks) is not None  # needs a detailed inspection
    verdict = diagnose_pair(looks, looks, detailed=closely)
    assert (verdict is not None and verdict.kind == "children") == is_hang
    expected = "of rank 0 on n1, process 9 waits in all_reduce (train.py, line 40, in step)"
    assert not verdict or expected in verdict.text
    busy = [replace(snap, cpu_s=2.0) for snap in looks]
    assert diagnose_pair(looks, busy, detailed=closely) is None
    last_hang = diagnose_pair(looks[:1], looks[:1], detailed=closely[:1], ended=[("n2", 1)])
    assert last_hang is not None
    assert "(it waits for processes that it started: process 9" in last_hang.text


def test_waiting_processes_hang_only_after_two_inspections(scene: Scene) -> None:
    scene.child_line = 1

    async def move() -> None:
        while not scene.hangs:  # position changes in each inspection: no hang
            scene.child_line += scene.looks < 20
            await asyncio.sleep(0.001)

    async def act(watch: HangWatch) -> None:
        assert scene.looks >= 20
        scene.child_line = 0
        scene.line, scene.call = 40, 0
        await scene.works(watch)

    async def both() -> None:
        moving = asyncio.ensure_future(move())
        await scene.play(act)
        await moving

    asyncio.run(both())
    assert scene.hangs[0] is not None
    assert scene.hangs[0].kind == "children"
    assert scene.hangs[1] is None


def test_remedy_suggests_distinct_ranks_for_spawned_processes() -> None:
    place = "process 9 waits in init_process_group (train.py, line 4, in work)"
    for text in (
        f"all ranks wait for processes that they started: of rank 0 on n1, {place}",
        f"rank 1 on n2 is stuck (it waits for processes that it started: {place})",
    ):
        hang = Event("hang", None, None, fields={"text": text})
        evidence = Evidence(events=(hang,), result=Result(130, interrupted=2))
        assert "RANK * nprocs" in conclude(evidence, load_all()).matches[0][1].remedy


def test_stopped_job_hung_unless_hang_was_over() -> None:
    hang = Event("hang", "n2", 1, fields={"text": "rank 1 on n2 is stuck"})
    evidence = Evidence(events=(hang,), result=Result(130, interrupted=2))
    conclusion = conclude(evidence, load_all())
    assert "the job hung: rank 1 on n2" in conclusion.text
    assert "another collective" in conclusion.matches[0][1].reason  # not the stop
    over = Evidence(events=(hang, Event("hang over")), result=Result(130, interrupted=2))
    assert "nothing failed" in conclude(over, load_all()).text


def test_phases_in_memory_are_bounded() -> None:
    stats = HeartbeatStats()
    for number in range(2 * heartbeats.MAX_PHASES):
        stats.take(0, 1, f"phase {number}", float(number))
    assert len(stats._slowest) == len(stats._num_phases) == heartbeats.MAX_PHASES
