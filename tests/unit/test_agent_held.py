"""What holds a process up, as the kernel's tables say."""

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
    """Starts a shell's command; ends it."""
    started: list[subprocess.Popen[bytes]] = []

    def start(words: str, **how: Any) -> int:
        argv = ["sh", "-c", words]
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
    while (found := stalls.blocking_call(pid))["call"] != call:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def test_a_write_into_a_full_pipe_and_who_could_read_it(child: Any) -> None:
    pid = child("exec cat /dev/zero", stdout=subprocess.PIPE)
    found = wait_for(pid, "write")
    assert found["on"].startswith("pipe:[")
    assert stalls.pipe_readers(found["on"], [pid, os.getpid()]) == [os.getpid()]


def test_a_wait_for_a_child_and_for_a_pipe(child: Any) -> None:
    wait_for(child("sleep 600; true"), "wait4")
    assert wait_for(child("read x", stdin=subprocess.PIPE), "read")["on"].startswith("pipe:[")


def test_a_process_that_is_gone_is_not_known() -> None:
    assert stalls.blocking_call(2**22 + 1) == {"call": "", "on": "", "kernel": ""}
    assert stalls.context_switches(2**22 + 1) == 0
    assert stalls.describe_cause(2**22 + 1, "disk") == ""


def test_a_file_lies_on_a_file_system() -> None:
    assert stalls.find_mount(os.getpid(), "/proc/self/stat")[::2] == ("proc", "/proc")


@pytest.mark.parametrize(
    ("said", "soon"),
    [
        ({"kind": "event", "event": "recoverable", "able": True}, True),
        ({"kind": "event", "event": "newcomer ready"}, True),
        ({"kind": "event", "event": "recoverable", "able": False}, False),
        ({"kind": "event", "event": "heartbeat", "able": True}, False),
    ],
)
def test_a_stop_is_told_soon_of_a_rank_that_others_go_on_without(
    said: dict[str, object], soon: bool
) -> None:
    rank = rank_process.RankProcess(0, 0)
    rank.note_event(said)
    rank.stall.sample(100.0, seen(1, "T"), has_worked=False)
    assert rank.stall.is_stalled(101.0) is soon
    assert rank.stall.is_stalled(102.6)


def test_events_too_deep_to_parse_are_ignored() -> None:
    rank = rank_process.RankProcess(0, 0)
    data = b"[" * 200_000 + b'\n{"event": "heartbeat"}\n{"event": "un'
    assert rank.parse_events(data) == [{"event": "heartbeat"}]
    assert rank.parse_events(b'finished"}\n') == [{"event": "unfinished"}]


def test_a_stopped_process_is_told_of_after_a_while(child: Any) -> None:
    pid = child("exec sleep 600")
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while (stat := processes.read_stat(pid)) is None or stat.state != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    still = stalls.StallDetector()
    still.sample(100.0, stat, has_worked=False)
    assert not still.is_stalled(102.4)
    assert still.is_stalled(102.6)
    assert (still.cause, still.duration_s(103.0)) == ("stopped", 3.0)
    still.sample(103.0, seen(pid), has_worked=True)
    assert not still.is_stalled(110.0)


def test_a_slow_disk_is_no_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that answers now and then has the process wait anew."""
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
        ("S", "get_signal", "clock_nanosleep", "paused"),  # version 2
        ("D", "hrtimer_nanosleep", "clock_nanosleep", "paused"),  # version 1, while it slept
        ("D", "__refrigerator", "", "paused"),
        ("D", "percpu_rwsem_wait", "write", "disk"),
        ("D", "rpc_wait_bit_killable", "", "disk"),
        ("S", "hrtimer_nanosleep", "clock_nanosleep", ""),
    ],
)
def test_a_paused_control_group_is_no_dead_disk(
    monkeypatch: pytest.MonkeyPatch, state: str, kernel: str, call: str, how: str
) -> None:
    monkeypatch.setattr(stalls, "read_text", lambda path: kernel if path.endswith("wchan") else "")
    monkeypatch.setattr(
        stalls, "blocking_call", lambda _: {"call": call, "on": "", "kernel": kernel}
    )
    still = stalls.StallDetector()
    still.sample(0.0, seen(77, state), has_worked=False)
    assert still.cause == how


def test_swapped_to_death_and_a_first_touch_of_much_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Page faults alone are no trouble: a file that is mapped is read by them, too."""
    pressure = ["some avg10=0.00 avg60=0.00"]
    monkeypatch.setattr(stalls, "read_text", lambda path: pressure[0] if "pressure" in path else "")
    still = stalls.StallDetector()
    for second in range(3):
        still.sample(float(second), seen(77, "D", faults=second * 500), has_worked=True)
    assert still.cause == ""
    pressure[0] = "some avg10=93.10 avg60=20.00"
    for second in range(3, 15):
        still.sample(float(second), seen(77, "D", faults=second * 500), has_worked=True)
    assert still.cause == "swapped"
    assert still.is_stalled(14.0)
    assert stalls.describe_cause(77, "swapped") == "memory pressure 93 %"


def test_the_last_calls_of_a_flight_recorder() -> None:
    """Of many the last; what goes between two ranks alone is no collective."""
    one = {"process_group": ("0", "default_pg"), "profiling_name": "gloo:all_reduce"}
    entries = [{**one, "collective_seq_id": n, "input_sizes": [[4, 2], [9]]} for n in range(100)]
    entries.append({**one, "collective_seq_id": 5, "is_p2p": True, "input_sizes": []})
    entries.append({**one, "collective_seq_id": 100, "input_sizes": []})
    lines = flight_recorder.format_calls(entries)
    assert lines[-2:] == ["0 99 all_reduce of [4,2],[9]", "0 100 all_reduce"]
    assert len(lines) < flight_recorder.MAX_CALLS
    assert len(json.dumps(lines)) < flight_recorder.MAX_LINE_BYTES


def test_calls_of_a_group_that_is_no_more_are_not_told() -> None:
    """torch gives the groups that are made in their place the same names, and counts anew."""
    one = {"process_group": ("0", "default_pg"), "profiling_name": "gloo:barrier",
           "input_sizes": []}  # fmt: skip
    entries = [{**one, "collective_seq_id": 9, "time_created_ns": 100},
               {**one, "collective_seq_id": 1, "time_created_ns": 200}]  # fmt: skip
    assert flight_recorder.format_calls(entries, 150) == ["0 1 barrier"]
    assert flight_recorder.format_calls([{**one, "collective_seq_id": 9}], 150) == ["0 9 barrier"]


def test_unfinished_collectives_of_a_gpu() -> None:
    """The recorders of three NCCL ranks of which one was killed, or frozen."""
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
    assert not flight_recorder.unfinished_call(frozen)  # it was read after the abort
    assert not flight_recorder.unfinished_call(killed, killed[-1]["time_created_ns"] + 1)
    later = {**frozen[-1], "process_group": ["1", "pair"], "time_created_ns": 1 << 62}
    assert flight_recorder.unfinished_call([*killed, later]) == stuck
    gloo = [{**entry, "profiling_name": "gloo:all_reduce"} for entry in killed]
    assert not flight_recorder.unfinished_call(gloo)  # its calls end before the script goes on


def test_a_rank_that_becomes_a_program_does_not_die_of_a_question() -> None:
    """Asked just before: a shell gives way to all signals when it has waited for a child."""
    script = (
        "import os\nfrom paceline.agent.ranks import flight_recorder, process as rank\n"
        "flight_recorder.block_signal()\n"
        "os.kill(os.getpid(), flight_recorder.DUMP_SIGNAL)\n"
        "rank._execute(['sh', '-c', '/bin/true; /bin/true; exec grep ^SigBlk /proc/self/status'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    blocked = int(done.stdout.split()[1], 16)
    assert not blocked >> (flight_recorder.DUMP_SIGNAL - 1) & 1  # so it is asked no more


STACK = [
    "Stack (most recent call first):",
    '  File "/home/me/train.py", line 40 in step',
    '  File "/home/me/train.py", line 60 in <module>',
    '  File "<frozen runpy>", line 88 in _run_code',
    '  File "<frozen runpy>", line 198 in _run_module_as_main',
]
WHOLE = [line.strip() for line in STACK[1:3]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> stack_dump.StackDump:
    """Of a process that can answer."""
    monkeypatch.setattr(stack_dump, "request_stack", lambda _: ("S", True))
    monkeypatch.setattr(flight_recorder, "request", lambda _: True)
    return stack_dump.StackDump()


ONE = processes.Process(77, 5)


def test_a_stack_is_whole_when_its_last_line_has_come(asked: stack_dump.StackDump) -> None:
    asked.request(ONE)
    for line in STACK:
        assert not asked.has_stacks(time.monotonic())
        asked.add_line(line.encode())
    assert asked.has_stacks(time.monotonic())
    assert asked.stack == WHOLE


def test_a_spawned_process_answers_the_same_signal(asked: stack_dump.StackDump) -> None:
    assert gradient_watch.STACK_SIGNAL == stack_dump.STACK_SIGNAL
    asked.request(ONE)
    asked.add_line(b'  File "/home/me/train.py", line 3 in work')
    assert not asked.has_stacks(time.monotonic())
    asked.add_line(b'  File "<string>", line 1 in <module>')
    assert asked.has_stacks(time.monotonic())


def test_a_stack_that_comes_too_late_is_not_taken_for_the_next(asked: stack_dump.StackDump) -> None:
    asked.request(ONE)
    asked.request(ONE)
    for line in [STACK[0], '  File "/home/me/train.py", line 39 in <module>', STACK[-1], *STACK]:
        assert not asked.has_stacks(time.monotonic())
        asked.add_line(line.encode())
    assert asked.has_stacks(time.monotonic())
    assert asked.stack == WHOLE


def test_a_deep_stack_and_one_with_another_end_are_whole(asked: stack_dump.StackDump) -> None:
    asked.request(ONE)
    for line in [*STACK[:2], "  ..."]:
        asked.add_line(line.encode())
    assert asked.has_stacks(time.monotonic())
    asked.request(ONE)
    asked.add_line(STACK[1].encode())
    now = time.monotonic()
    assert not asked.has_stacks(now)
    assert asked.has_stacks(now + stack_dump.SILENCE_S + 0.1)


def test_who_has_told_its_last_call_is_not_asked_again(asked: stack_dump.StackDump) -> None:
    asked.set_calls(["0 7 barrier"])
    asked.request(ONE, collectives=True)
    assert asked.calls == ["0 7 barrier"]


def test_who_never_tells_its_calls_is_not_waited_for_again(asked: stack_dump.StackDump) -> None:
    """It has joined no group, or its torch has no recorder."""
    for complete in (False, True):
        asked.request(ONE, collectives=True)
        for line in STACK:
            asked.add_line(line.encode())
        assert asked.is_complete(time.monotonic()) == complete
    asked.set_calls(["0 7 barrier"])
    asked.request(ONE, collectives=True)
    assert not asked.is_complete(time.monotonic())
    assert asked.calls == []
    for _ in range(2):
        asked.set_calls(["0 8 barrier"])
    asked.request(ONE)
    assert asked.calls == ["0 8 barrier"]


@pytest.mark.parametrize(("ticks", "works"), [(4, False), (200, True)])
def test_what_answers_cost_is_no_work_but_what_is_done_meanwhile_is(
    monkeypatch: pytest.MonkeyPatch, asked: stack_dump.StackDump, ticks: int, works: bool
) -> None:
    monkeypatch.setattr(processes, "read_stat", lambda _: seen(77)._replace(cpu=ticks))
    rank = rank_process.RankProcess(0, 0)
    rank.process, rank.dump = ONE, asked
    begun = rank.active_at
    asked.request(ONE, collectives=True)
    now = time.monotonic()
    rank.sample(now)
    for line in STACK:
        asked.add_line(line.encode())
    asked.set_calls([], 0.02)
    rank.sample(now + 1.0)
    assert rank.active_at == begun  # nobody knows yet
    rank.sample(now + 1.0 + stack_dump.ANSWER_S)
    assert (rank.active_at > begun) == works


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


@pytest.mark.parametrize(("name", "works"), [("gloo_tcp_loop", False), ("python", True)])
def test_what_gloos_loop_uses_of_a_cpu_is_no_work(name: str, works: bool) -> None:
    """One that is woken for nothing never rests; what the others move is known by the bytes."""
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
        begun, (before,) = rank.active_at, inspection.inspect(node.ranks)
        until = spent(process.pid) + 100
        while spent(process.pid) < until:
            time.sleep(0.05)
        rank.sample(now + rank_process.MAX_INTERVAL_S)
        (after,) = inspection.inspect(node.ranks)
        assert (rank.active_at > begun) == works
        assert (after["cpu_s"] - before["cpu_s"] > 0.5) == works
        process.kill()


def spent(pid: int) -> int:
    """Clock ticks of a process."""
    stat = processes.read_stat(pid)
    assert stat is not None
    return stat.cpu


def test_what_has_not_arrived_is_not_sent() -> None:
    """As over a network that takes nothing any more."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        one = stack.enter_context(socket.create_connection(server.getsockname()))
        other = stack.enter_context(server.accept()[0])
        before, sent = processes.bytes_sent(os.getpid()), 0
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sent += os.write(one.fileno(), bytes(1 << 16))
        assert processes.bytes_sent(os.getpid()) - before < sent
        left = sent
        while left:
            left -= len(other.recv(1 << 20))
        while processes.bytes_sent(os.getpid()) - before < sent:
            time.sleep(0.01)


def test_a_crash_leaves_the_lines_of_the_main_thread() -> None:
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
