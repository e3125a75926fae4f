"""Tests the detection of stalled processes, stack dumps, and the flight recorder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.agent.ranks import flight_recorder, gradient_watch, stack_dump
from paceline.agent.supervision import inspection, job, processes, rank_process, stalls


def seen(pid: int, state: str = "S", faults: int = 0) -> processes.Stat:
    return processes.Stat(pid, 1, 1, state, 5, faults=faults)


@pytest.fixture
def child() -> Iterator[Any]:
    """Returns a function that starts a shell command; kills the commands after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(command: str, **how: Any) -> int:
        argv = ["sh", "-c", command]
        started.append(subprocess.Popen(argv, start_new_session=True, **how))
        return started[-1].pid

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stdin):
            if stream:
                stream.close()


def wait_for(pid: int, call: str) -> dict[str, str]:
    deadline = time.monotonic() + 10
    while (call_info := stalls.blocking_call(pid))["call"] != call:
        assert time.monotonic() < deadline, call_info
        time.sleep(0.02)
    return call_info


def test_blocked_pipe_write_and_its_readers(child: Any) -> None:
    pid = child("exec cat /dev/zero", stdout=subprocess.PIPE)
    call_info = wait_for(pid, "write")
    assert call_info["on"].startswith("pipe:[")
    assert stalls.pipe_readers(call_info["on"], [pid, os.getpid()]) == [os.getpid()]


def test_blocking_wait_for_child_and_pipe(child: Any) -> None:
    wait_for(child("sleep 600; true"), "wait4")
    assert wait_for(child("read x", stdin=subprocess.PIPE), "read")["on"].startswith("pipe:[")


def test_ended_process_has_no_blocking_call() -> None:
    assert stalls.blocking_call(2**22 + 1) == {"call": "", "on": "", "kernel": ""}
    assert stalls.context_switches(2**22 + 1) == 0
    assert stalls.describe_cause(2**22 + 1, "disk") == ""


def test_find_mount_of_file() -> None:
    assert stalls.find_mount(os.getpid(), "/proc/self/stat")[::2] == ("proc", "/proc")


@pytest.mark.parametrize(
    ("event", "is_early"),
    [
        ({"kind": "event", "event": "recoverable", "able": True}, True),
        ({"kind": "event", "event": "newcomer ready"}, True),
        ({"kind": "event", "event": "recoverable", "able": False}, False),
        ({"kind": "event", "event": "heartbeat", "able": True}, False),
    ],
)
def test_stopped_recoverable_rank_is_reported_early(
    event: dict[str, object], is_early: bool
) -> None:
    rank = rank_process.RankProcess(0, 0)
    rank.note_event(event)
    rank.stall.sample(100.0, seen(1, "T"), has_worked=False)
    assert rank.stall.is_stalled(101.0) is is_early
    assert rank.stall.is_stalled(102.6)


def test_ignores_events_nested_too_deeply() -> None:
    rank = rank_process.RankProcess(0, 0)
    data = b"[" * 200_000 + b'\n{"event": "heartbeat"}\n{"event": "un'
    assert rank.parse_events(data) == [{"event": "heartbeat"}]
    assert rank.parse_events(b'finished"}\n') == [{"event": "unfinished"}]


def test_stopped_process_is_reported_with_delay(child: Any) -> None:
    pid = child("exec sleep 600")
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while (stat := processes.read_stat(pid)) is None or stat.state != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    detector = stalls.StallDetector()
    detector.sample(100.0, stat, has_worked=False)
    assert not detector.is_stalled(102.4)
    assert detector.is_stalled(102.6)
    assert (detector.cause, detector.duration_s(103.0)) == ("stopped", 3.0)
    detector.sample(103.0, seen(pid), has_worked=True)
    assert not detector.is_stalled(110.0)


def test_slow_disk_is_not_reported_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk answers now and then, so that each wait of the process is a new one."""
    count = [1]
    monkeypatch.setattr(stalls, "context_switches", lambda _: count[0])
    slow, dead = stalls.StallDetector(), stalls.StallDetector()
    for second in range(20):
        dead.sample(float(second), seen(77, "D"), has_worked=False)
    assert dead.is_stalled(19.0)
    for second in range(20):
        count[0] += second % 5 == 0
        slow.sample(float(second), seen(77, "D"), has_worked=False)
        assert not slow.is_stalled(float(second))


@pytest.mark.parametrize(
    ("state", "kernel", "call", "how"),
    [
        ("S", "get_signal", "clock_nanosleep", "paused"),  # cgroup version 2
        ("D", "hrtimer_nanosleep", "clock_nanosleep", "paused"),  # cgroup version 1, while asleep
        ("D", "__refrigerator", "", "paused"),
        ("D", "percpu_rwsem_wait", "write", "disk"),
        ("D", "rpc_wait_bit_killable", "", "disk"),
        ("S", "hrtimer_nanosleep", "clock_nanosleep", ""),
    ],
)
def test_paused_cgroup_is_not_reported_as_dead_disk(
    monkeypatch: pytest.MonkeyPatch, state: str, kernel: str, call: str, how: str
) -> None:
    monkeypatch.setattr(stalls, "read_text", lambda path: kernel if path.endswith("wchan") else "")
    monkeypatch.setattr(
        stalls, "blocking_call", lambda _: {"call": call, "on": "", "kernel": kernel}
    )
    detector = stalls.StallDetector()
    detector.sample(0.0, seen(77, state), has_worked=False)
    assert detector.cause == how


def test_detects_thrashing_but_not_first_touch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Page faults alone show no memory pressure: reading a mapped file also causes them."""
    pressure = ["some avg10=0.00 avg60=0.00"]
    monkeypatch.setattr(stalls, "read_text", lambda path: pressure[0] if "pressure" in path else "")
    detector = stalls.StallDetector()
    for second in range(3):
        detector.sample(float(second), seen(77, "D", faults=second * 500), has_worked=True)
    assert detector.cause == ""
    pressure[0] = "some avg10=93.10 avg60=20.00"
    for second in range(3, 15):
        detector.sample(float(second), seen(77, "D", faults=second * 500), has_worked=True)
    assert detector.cause == "swapped"
    assert detector.is_stalled(14.0)
    assert stalls.describe_cause(77, "swapped") == "memory pressure 93 %"


def test_format_calls_keeps_last_collectives() -> None:
    """Only the last calls are kept; point-to-point calls are no collectives."""
    one = {"process_group": ("0", "default_pg"), "profiling_name": "gloo:all_reduce"}
    entries = [{**one, "collective_seq_id": n, "input_sizes": [[4, 2], [9]]} for n in range(100)]
    entries.append({**one, "collective_seq_id": 5, "is_p2p": True, "input_sizes": []})
    entries.append({**one, "collective_seq_id": 100, "input_sizes": []})
    lines = flight_recorder.format_calls(entries)
    assert lines[-2:] == ["0 99 all_reduce of [4,2],[9]", "0 100 all_reduce"]
    assert len(lines) < flight_recorder.MAX_CALLS
    assert len(json.dumps(lines)) < flight_recorder.MAX_LINE_BYTES


def test_format_calls_skips_former_groups() -> None:
    """A new group has the name of the group that it replaces, and its calls are numbered anew."""
    one = {"process_group": ("0", "default_pg"), "profiling_name": "gloo:barrier",
           "input_sizes": []}  # fmt: skip
    entries = [{**one, "collective_seq_id": 9, "time_created_ns": 100},
               {**one, "collective_seq_id": 1, "time_created_ns": 200}]  # fmt: skip
    assert flight_recorder.format_calls(entries, 150) == ["0 1 barrier"]
    assert flight_recorder.format_calls([{**one, "collective_seq_id": 9}], 150) == ["0 9 barrier"]


def test_unfinished_call_of_nccl_recorder() -> None:
    """The recordings are of three NCCL ranks, one of which was killed or frozen."""
    folder = Path(__file__).parents[2] / "bench/gpu/nccl_h200_2026-11-27"
    dumps = [(folder / f"flight_recorder_{name}.json").read_text()
             for name in ("first_killed_rank_1", "frozen_rank_0")]  # fmt: skip
    modules = [SimpleNamespace(_dump_fr_trace_json=lambda *_: "{}",
                               _dump_nccl_trace_json=lambda *_, text=text: text)
               for text in dumps]  # fmt: skip
    killed, frozen = map(flight_recorder._read_entries, modules)
    assert flight_recorder.format_calls(killed)[-1] == "0 47 all_reduce of [26122]"
    stuck = "0 47 all_reduce of [26122]"
    assert flight_recorder.unfinished_call(killed) == stuck
    assert not flight_recorder.unfinished_call(frozen)  # recorded after the abort
    assert not flight_recorder.unfinished_call(killed, killed[-1]["time_created_ns"] + 1)
    later = {**frozen[-1], "process_group": ["1", "pair"], "time_created_ns": 1 << 62}
    assert flight_recorder.unfinished_call([*killed, later]) == stuck
    gloo = [{**entry, "profiling_name": "gloo:all_reduce"} for entry in killed]
    assert not flight_recorder.unfinished_call(gloo)  # gloo's calls block the script


def test_dump_signal_does_not_kill_executed_program() -> None:
    """The signal arrives just before the exec; a shell unblocks signals after a child's end."""
    script = (
        "import os\nfrom paceline.agent.ranks import flight_recorder, process as rank\n"
        "flight_recorder.block_signal()\n"
        "os.kill(os.getpid(), flight_recorder.DUMP_SIGNAL)\n"
        "rank._execute(['sh', '-c', '/bin/true; /bin/true; exec grep ^SigBlk /proc/self/status'])\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    blocked = int(result.stdout.split()[1], 16)
    assert not blocked >> (flight_recorder.DUMP_SIGNAL - 1) & 1  # so no dump is requested any more


STACK = [
    "Stack (most recent call first):",
    '  File "/home/me/train.py", line 40 in step',
    '  File "/home/me/train.py", line 60 in <module>',
    '  File "<frozen runpy>", line 88 in _run_code',
    '  File "<frozen runpy>", line 198 in _run_module_as_main',
]
EXPECTED_STACK = [line.strip() for line in STACK[1:3]]


@pytest.fixture
def requested_dump(monkeypatch: pytest.MonkeyPatch) -> stack_dump.StackDump:
    """Returns a stack dump of a process that can answer."""
    monkeypatch.setattr(stack_dump, "request_stack", lambda _: ("S", True))
    monkeypatch.setattr(flight_recorder, "request", lambda _: True)
    return stack_dump.StackDump()


PROCESS = processes.Process(77, 5)


def test_stack_is_complete_with_last_line(requested_dump: stack_dump.StackDump) -> None:
    requested_dump.request(PROCESS)
    for line in STACK:
        assert not requested_dump.has_stacks(time.monotonic())
        requested_dump.add_line(line.encode())
    assert requested_dump.has_stacks(time.monotonic())
    assert requested_dump.stack == EXPECTED_STACK


def test_stack_of_spawned_process_is_complete(requested_dump: stack_dump.StackDump) -> None:
    assert gradient_watch.STACK_SIGNAL == stack_dump.STACK_SIGNAL
    requested_dump.request(PROCESS)
    requested_dump.add_line(b'  File "/home/me/train.py", line 3 in work')
    assert not requested_dump.has_stacks(time.monotonic())
    requested_dump.add_line(b'  File "<string>", line 1 in <module>')
    assert requested_dump.has_stacks(time.monotonic())


def test_late_stack_is_not_taken_for_next_request(requested_dump: stack_dump.StackDump) -> None:
    requested_dump.request(PROCESS)
    requested_dump.request(PROCESS)
    for line in [STACK[0], '  File "/home/me/train.py", line 39 in <module>', STACK[-1], *STACK]:
        assert not requested_dump.has_stacks(time.monotonic())
        requested_dump.add_line(line.encode())
    assert requested_dump.has_stacks(time.monotonic())
    assert requested_dump.stack == EXPECTED_STACK


def test_deep_and_unterminated_stacks_are_complete(requested_dump: stack_dump.StackDump) -> None:
    requested_dump.request(PROCESS)
    for line in [*STACK[:2], "  ..."]:
        requested_dump.add_line(line.encode())
    assert requested_dump.has_stacks(time.monotonic())
    requested_dump.request(PROCESS)
    requested_dump.add_line(STACK[1].encode())
    now = time.monotonic()
    assert not requested_dump.has_stacks(now)
    assert requested_dump.has_stacks(now + stack_dump.SILENCE_S + 0.1)


def test_known_calls_answer_next_request(requested_dump: stack_dump.StackDump) -> None:
    requested_dump.set_calls(["0 7 barrier"])
    requested_dump.request(PROCESS, collectives=True)
    assert requested_dump.calls == ["0 7 barrier"]


def test_does_not_wait_twice_for_missing_calls(requested_dump: stack_dump.StackDump) -> None:
    """The rank has joined no group, or its torch has no flight recorder."""
    for complete in (False, True):
        requested_dump.request(PROCESS, collectives=True)
        for line in STACK:
            requested_dump.add_line(line.encode())
        assert requested_dump.is_complete(time.monotonic()) == complete
    requested_dump.set_calls(["0 7 barrier"])
    requested_dump.request(PROCESS, collectives=True)
    assert not requested_dump.is_complete(time.monotonic())
    assert requested_dump.calls == []
    for _ in range(2):
        requested_dump.set_calls(["0 8 barrier"])
    requested_dump.request(PROCESS)
    assert requested_dump.calls == ["0 8 barrier"]


@pytest.mark.parametrize(("ticks", "is_work"), [(4, False), (200, True)])
def test_cpu_time_of_stack_dumps_is_not_work(
    monkeypatch: pytest.MonkeyPatch, requested_dump: stack_dump.StackDump, ticks: int, is_work: bool
) -> None:
    monkeypatch.setattr(processes, "read_stat", lambda _: seen(77)._replace(cpu=ticks))
    rank = rank_process.RankProcess(0, 0)
    rank.process, rank.dump = PROCESS, requested_dump
    initial_active_at = rank.active_at
    requested_dump.request(PROCESS, collectives=True)
    now = time.monotonic()
    rank.sample(now)
    for line in STACK:
        requested_dump.add_line(line.encode())
    requested_dump.set_calls([], 0.02)
    rank.sample(now + 1.0)
    assert rank.active_at == initial_active_at  # not known yet
    rank.sample(now + 1.0 + stack_dump.ANSWER_S)
    assert (rank.active_at > initial_active_at) == is_work


SPINS = """
import sys, threading
def spin():
    open("/proc/thread-self/comm", "w").write(sys.argv[1])
    print("begins", flush=True)
    while True:
        pass
threading.Thread(target=spin, daemon=True).start()
sys.stdin.read()
"""


@pytest.mark.parametrize(("name", "is_work"), [("gloo_tcp_loop", False), ("python", True)])
def test_cpu_time_of_gloo_loop_is_not_work(name: str, is_work: bool) -> None:
    """gloo's loop may spin without work; traffic is counted in bytes."""
    rank = rank_process.RankProcess(0, 0)
    node = job.NodeJob(lambda *_: None, "")
    node.ranks.append(rank)
    with subprocess.Popen([sys.executable, "-c", SPINS, name], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        rank.process = processes.identify(process.pid)
        now = time.monotonic()
        rank.sample(now)
        initial_active_at, (before,) = rank.active_at, inspection.inspect(node.ranks)
        end_ticks = cpu_ticks(process.pid) + 100
        while cpu_ticks(process.pid) < end_ticks:
            time.sleep(0.05)
        rank.sample(now + rank_process.MAX_INTERVAL_S)
        (after,) = inspection.inspect(node.ranks)
        assert (rank.active_at > initial_active_at) == is_work
        assert (after["cpu_s"] - before["cpu_s"] > 0.5) == is_work
        process.kill()


def cpu_ticks(pid: int) -> int:
    """Returns the CPU time of a process in clock ticks."""
    stat = processes.read_stat(pid)
    assert stat is not None
    return stat.cpu


def test_bytes_sent_counts_only_delivered_bytes() -> None:
    """The receiver reads nothing, as if the network had stopped."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        one = stack.enter_context(socket.create_connection(server.getsockname()))
        receiver = stack.enter_context(server.accept()[0])
        before, sent = processes.bytes_sent(os.getpid()), 0
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sent += os.write(one.fileno(), bytes(1 << 16))
        assert processes.bytes_sent(os.getpid()) - before < sent
        remaining = sent
        while remaining:
            remaining -= len(receiver.recv(1 << 20))
        while processes.bytes_sent(os.getpid()) - before < sent:
            time.sleep(0.01)


def test_crash_dump_keeps_main_thread_stack() -> None:
    dump = b"""Fatal Python error: Aborted

    Thread 0x1 (most recent call first):
      File "/lib/python3.11/threading.py", line 5 in wait

    Thread 0x2 (most recent call first):
      File "/home/me/train.py", line 40 in step
      File "/home/me/train.py", line 60 in <module>

    Extension modules: numpy"""
    seen = stack_dump.StackDump()
    for line in dump.split(b"\n"):
        seen.add_line(line)
    assert seen.is_requested
    assert seen.stack == ['File "/home/me/train.py", line 40 in step',
                          'File "/home/me/train.py", line 60 in <module>']  # fmt: skip
