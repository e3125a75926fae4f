"""Tests that a rank exits like plain Python, without being aborted by threads of gloo."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

# aborts when the interpreter is torn down, as a thread of gloo may
TRAP = "import ctypes; ctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).abort)\n"

SCRIPTS = {
    "returns": ("print('out')", 0),
    "exits": ("import sys; sys.exit(7)", 7),
    "exits large": ("import sys; sys.exit(256 + 9)", 9),
    "exits none": ("import sys; sys.exit()", 0),
    "message": ("import sys; sys.exit('a message')", 1),
    "raises": ("1 / 0", 1),
    "interrupted": (
        "import atexit; atexit.register(print, 'at exit')\n"
        "log = open('log', 'w'); log.write('text'); print('out')\n"
        "raise KeyboardInterrupt",
        -signal.SIGINT,
    ),
    "at exit": (
        "import atexit; atexit.register(print, 'at exit'); atexit.register(lambda: 1/0)",
        0,
    ),
    "thread": (
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.3), print('late'))).start()",
        0,
    ),
    "daemon": (
        "import threading, time\n"
        "threading.Thread(target=lambda: time.sleep(9), daemon=True).start()",
        0,
    ),
    "pool": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "import time\n"
        "ThreadPoolExecutor(1).submit(lambda: (time.sleep(0.2), print('pooled')))",
        0,
    ),
    "children": (
        "import multiprocessing as mp, time\n"
        "def work(): time.sleep(0.2); print('child', flush=True)\n"
        "mp.get_context('fork').Process(target=work).start()",
        0,
    ),
    "fork": (
        "import os, sys\n"
        "child = os.fork()\n"
        "if child: print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "else: sys.exit(3)",
        0,
    ),
    "files": (
        "kept = open('kept', 'w'); kept.write('text')\n"
        "raw = open('raw', 'wb'); raw.write(b'bytes')\n"
        "class Box: pass\n"
        "box = Box(); box.me = box; box.file = open('ring', 'w'); box.file.write('ring')",
        0,
    ),
    "del": (
        "class Last:\n"
        "    def __del__(self): print('finalized')\n"
        "one = Last(); ring = [Last()]; ring.append(ring)",
        0,
    ),
    "folder": ("import tempfile; it = tempfile.TemporaryDirectory(dir='.')", 0),
    "output of C": ("import ctypes; ctypes.CDLL(None).printf(b'from C\\n')", 0),
    "closed": ("import sys; sys.stdout.close()", 0),
}

RANK = """
import os, sys
sys.path.insert(0, {source!r})
from paceline.agent.supervision import gloo_threads
from paceline.agent.ranks import interpreter_exit, process
with open("/proc/self/task/%d/comm" % os.getpid()) as file:
    gloo_threads.WORKER_THREADS = file.read().strip()  # this thread passes for one of gloo
assert not interpreter_exit.is_safe()
sys.path.pop(0)
entry = {{"kind": "script", "target": {script!r}, "args": []}}
sys.exit(process.run(entry, {folder!r}, os.open(os.devnull, os.O_WRONLY)))
"""


Outcome = tuple[int, str, str, dict[str, str]]
SOURCE = str(Path(__file__).parents[2] / "src")


def run_python(folder: Path, *argv: str) -> Outcome:
    """Returns the exit status, stdout, stderr and the files in the folder."""
    folder.mkdir()
    completed = subprocess.run(
        [sys.executable, *argv], cwd=folder, capture_output=True, text=True, timeout=30
    )
    files = {path.name: path.read_text() for path in folder.iterdir()}
    return completed.returncode, completed.stdout, completed.stderr, files


def final_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


@pytest.mark.parametrize("name", SCRIPTS)
def test_exit_matches_plain_python(tmp_path: Path, name: str) -> None:
    text, status = SCRIPTS[name]
    script = tmp_path / "script.py"
    script.write_text(text)
    expected = run_python(tmp_path / "plain", str(script))
    script.write_text(TRAP + text)
    folder = tmp_path / "ours"
    rank = RANK.format(source=SOURCE, script=str(script), folder=str(folder))
    actual = run_python(folder, "-c", rank)
    assert actual[0] == expected[0] == status, actual[2]
    assert actual[1] == expected[1]
    assert actual[3] == expected[3]
    assert final_line(actual[2]) == final_line(expected[2])


def test_trap_aborts_interpreter(tmp_path: Path) -> None:
    assert run_python(tmp_path / "trapped", "-c", TRAP)[0] == -signal.SIGABRT


MODULE = """
import os, runpy, sys
sys.path[:] = [{source!r}, *sys.path[1:]]
from paceline.agent.ranks import process
os.environ["LOCAL_RANK"] = "0"
runpy._run_module_as_main = lambda name: print([path for path in sys.path if path == {folder!r}])
process._run_python({{"kind": "module", "target": {target!r}, "args": []}})
"""


@pytest.mark.parametrize(
    ("target", "sees_working_dir"),
    [("paceline.bench.collectives_job", False), ("paceline.recipes.image", False), ("mine", True)],
)
def test_paceline_modules_import_nothing_from_working_dir(
    tmp_path: Path, target: str, sees_working_dir: bool
) -> None:
    """You may type ``paceline check`` in a project that you do not trust."""
    code = MODULE.format(source=SOURCE, folder=str(tmp_path / "a"), target=target)
    status, output, errors, _ = run_python(tmp_path / "a", "-c", code)
    assert (status, output.strip()) == (0, f"{[str(tmp_path / 'a')][:sees_working_dir]}"), errors
