"""Tests that a session saves and says how to resume, whatever interrupts it and when."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from terminals import Terminal, on_terminal

SCRIPT = Path(__file__).with_name("interrupted_training.py")
PACELINE = [sys.executable, "-m", "paceline"]
TIMEOUT_S = 120.0

Interrupt = Callable[[Terminal, Path], None]


def signals_launcher(number: signal.Signals) -> Interrupt:
    return lambda terminal, _: terminal.program.send_signal(number)


def signals_all(number: signal.Signals) -> Interrupt:
    """Returns an interrupt that signals all processes of the job, as schedulers do."""

    def send(terminal: Terminal, run: Path) -> None:
        processes = [psutil.Process(terminal.program.pid)]
        processes += processes[0].children(recursive=True)
        for rank in ranks_of(run):  # a warm agent is not a child of the launcher
            guard = rank.parents()[2]
            processes += [guard, *guard.children(recursive=True)]
        for pid in {process.pid for process in processes}:
            os.kill(pid, number)

    return send


def types_ctrl_c(terminal: Terminal, _: Path) -> None:
    terminal.types(b"\x03")


def closes_terminal(terminal: Terminal, _: Path) -> None:
    """Sends SIGHUP as the kernel does: only to the foreground group, which is the launcher's."""
    os.killpg(os.tcgetpgrp(terminal.descriptor), signal.SIGHUP)


def runs_stop_command(_: Terminal, run: Path) -> None:
    subprocess.run([*PACELINE, "stop", str(run)], check=True, capture_output=True)


def signals_to_save(terminal: Terminal, run: Path) -> None:
    """SIGUSR2 makes launcher and ranks save and continue; then SIGTERM ends the launcher."""
    signals_all(signal.SIGUSR2)(terminal, run)
    terminal.program.send_signal(signal.SIGTERM)


INTERRUPTS: dict[str, tuple[Interrupt, int]] = {  # with the exit status
    "SIGINT": (signals_launcher(signal.SIGINT), 130),
    "SIGTERM": (signals_launcher(signal.SIGTERM), 143),
    "SIGUSR1": (signals_launcher(signal.SIGUSR1), 138),
    "Ctrl-C": (types_ctrl_c, 130),
    "closed terminal": (closes_terminal, 129),
    "paceline stop": (runs_stop_command, 143),
    "SIGTERM to all": (signals_all(signal.SIGTERM), 143),
    "SIGUSR1 to all": (signals_all(signal.SIGUSR1), 138),
    "SIGUSR2 to all, SIGTERM": (signals_to_save, 143),
}


def ranks_of(run: Path) -> list[psutil.Process]:
    """Returns the rank processes of a run on this machine."""
    events = (run / "events.jsonl").read_text()
    return [
        psutil.Process(int(pid)) for pid in re.findall(r'"rank started".*?"pid": ?(\d+)', events)
    ]


def wait_for(path: Path, terminal: Terminal) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, terminal.said.decode()
        assert terminal.program.poll() is None or path.exists(), terminal.said.decode()
        terminal.reads(b"nothing that is ever said", 0.05)


def interrupt_training(name: str, moment: str, folder: Path, guards: set[psutil.Process]) -> str:
    """Interrupts a training at a moment; returns what is wrong with its end, or "".

    Args:
        name: Name of the interrupt.
        moment: See ``interrupted_training.py``.
        folder: Folder of the run, made here.
        guards: Set to which the agent's guard is added; the agent serves the next training, too.
    """
    interrupt, expected_status = INTERRUPTS[name]
    run, ready = folder / "run", folder / "ready"
    folder.mkdir()
    ranks = "2" if moment == "collective" else "1"
    argv = [*PACELINE, "run", "--screen", "lines", "-p", ranks, "--keep-warm", "5m"]
    argv += ["--grace", str(TIMEOUT_S), "--run-dir", str(run), str(SCRIPT), moment, "fork"]
    with on_terminal([*argv, str(ready)], cwd=folder, columns=500) as terminal:
        wait_for(ready, terminal)
        processes = [process for rank in ranks_of(run) for process in rank.children(recursive=True)]
        assert len(processes) >= 2 * int(ranks), "the data workers do not run"
        guards.update(rank.parents()[2] for rank in ranks_of(run))
        interrupt(terminal, run)
        status = terminal.ends()
        shown = terminal.said.decode()
    saved = max((int(path.name) for path in run.glob("checkpoints/[0-9]*")), default=-1)
    remaining = [process.pid for process in processes if process.is_running()]
    if status != expected_status:
        return f"status {status} instead of {expected_status}: {shown}"
    if "to resume: " not in shown:
        return f"does not say how to resume: {shown}"
    if saved < int(ready.read_text()):
        return f"interrupted after step {ready.read_text()}, saved {saved}"
    return f"left {remaining}" if remaining else ""


@pytest.fixture
def guards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[psutil.Process]]:
    """Collects the guards of warm agents, and ends these after the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    warm_guards: set[psutil.Process] = set()
    yield warm_guards
    for guard in warm_guards:
        with contextlib.suppress(psutil.NoSuchProcess):
            guard.terminate()


# interrupts for other moments: the launcher signals the ranks, or a signal reaches them first
COMMON_INTERRUPTS = ("Ctrl-C", "SIGTERM to all")
MOMENTS = {
    "step": tuple(INTERRUPTS),
    "evaluation": COMMON_INTERRUPTS,
    "checkpoint": (*COMMON_INTERRUPTS, "SIGUSR2 to all, SIGTERM"),
    "epoch-end": COMMON_INTERRUPTS,
    "collective": (*COMMON_INTERRUPTS, "SIGUSR2 to all, SIGTERM"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_interrupt_saves_checkpoint(
    moment: str, tmp_path: Path, guards: set[psutil.Process]
) -> None:
    """A moment's trainings use the same fork server, which saves most of their time."""
    problems = {
        name: interrupt_training(name, moment, tmp_path / name, guards) for name in MOMENTS[moment]
    }
    assert not {name: problem for name, problem in problems.items() if problem}


HANDLER_AND_WORKER = """
    import multiprocessing, signal, sys, time
    worker = multiprocessing.Process(target=time.sleep, args=(600,))
    worker.start()
    def save(*_):
        time.sleep(1)
        print("saved, the worker runs:", worker.is_alive())
        worker.kill()
        sys.exit()
    signal.signal(signal.SIGTERM, save)
    print("ready", flush=True)
    worker.join()
"""
# ready some time after its start: by then, the script waits for it and does nothing else
SAVING = (
    "trap 'sleep 2; echo saved by the child; exit' TERM; sleep 0.5; echo ready; sleep 600 & wait"
)
NO_HANDLER = f"""
    import subprocess
    subprocess.run(["sh", "-c", "{SAVING}"])
"""
INTERRUPTED = """
    import time
    print("ready", flush=True)
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        print("saved by the script")
        raise
"""
PROGRAM = f"""
    trap 'echo trapped' TERM
    sh -c "{SAVING}"
"""


@pytest.mark.parametrize(
    ("options", "text", "saved"),
    [
        ("", HANDLER_AND_WORKER, "saved, the worker runs: True"),
        ("", NO_HANDLER, "saved by the child"),
        ("", INTERRUPTED, "saved by the script"),
        ("--no-python bash", PROGRAM, "saved by the child"),
    ],
)
def test_script_handler_has_time_to_save(
    tmp_path: Path, options: str, text: str, saved: str
) -> None:
    """A handler of the script, or of a child, has time to save, and its workers still run.

    So has a script that handles KeyboardInterrupt.
    """
    (tmp_path / "script").write_text(textwrap.dedent(text))
    argv = [*PACELINE, "run", "--no-torch", "--screen", "lines", "--grace", str(TIMEOUT_S)]
    argv += ["--run-dir", "run", *options.split(), "script"]
    with on_terminal(argv, cwd=tmp_path) as terminal:
        assert terminal.reads(b"ready", TIMEOUT_S), terminal.said.decode()
        terminal.types(b"\x03")
        assert terminal.ends() == 130
    assert saved in terminal.said.decode()
    assert "Traceback" not in terminal.said.decode()
