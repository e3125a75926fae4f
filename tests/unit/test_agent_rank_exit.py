"""A rank with threads of gloo ends as Python does, but cannot be aborted on the way."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

# what would abort at the interpreter's teardown, as a thread of gloo may
TRAP = "import ctypes; ctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).abort)\n"

ENDS = {
    "returns": ("print('out')", 0),
    "exits": ("import sys; sys.exit(7)", 7),
    "exits large": ("import sys; sys.exit(256 + 9)", 9),
    "exits none": ("import sys; sys.exit()", 0),
    "message": ("import sys; sys.exit('a message')", 1),
    "raises": ("1 / 0", 1),
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


Ended = tuple[int, str, str, dict[str, str]]
SOURCE = str(Path(__file__).parents[2] / "src")


def ended(folder: Path, *argv: str) -> Ended:
    """Status, output, errors and files that were left."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, *argv], cwd=folder, capture_output=True, text=True, timeout=30
    )
    files = {path.name: path.read_text() for path in folder.iterdir()}
    return done.returncode, done.stdout, done.stderr, files


def last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


@pytest.mark.parametrize("name", ENDS)
def test_ends_as_python_does(tmp_path: Path, name: str) -> None:
    text, status = ENDS[name]
    script = tmp_path / "script.py"
    script.write_text(text)
    plain = ended(tmp_path / "plain", str(script))
    script.write_text(TRAP + text)
    folder = tmp_path / "ours"
    rank = RANK.format(source=SOURCE, script=str(script), folder=str(folder))
    ours = ended(folder, "-c", rank)
    assert ours[0] == plain[0] == status, ours[2]
    assert ours[1] == plain[1]
    assert ours[3] == plain[3]
    assert last_line(ours[2]) == last_line(plain[2])


def test_the_trap_is_one(tmp_path: Path) -> None:
    assert ended(tmp_path / "trapped", "-c", TRAP)[0] == -signal.SIGABRT


MODULE = """
import os, runpy, sys
sys.path[:] = [{source!r}, *sys.path[1:]]
from paceline.agent.ranks import process
os.environ["LOCAL_RANK"] = "0"
runpy._run_module_as_main = lambda name: print([path for path in sys.path if path == {folder!r}])
process._run_python({{"kind": "module", "target": {target!r}, "args": []}})
"""


@pytest.mark.parametrize(
    ("target", "imports_from_there"),
    [("paceline.bench.collectives_job", False), ("paceline.recipes.image", False), ("mine", True)],
)
def test_what_we_measure_imports_nothing_from_the_folder(
    tmp_path: Path, target: str, imports_from_there: bool
) -> None:
    """``paceline check`` may be typed in a project that came from somebody else."""
    code = MODULE.format(source=SOURCE, folder=str(tmp_path / "a"), target=target)
    status, output, errors, _ = ended(tmp_path / "a", "-c", code)
    assert (status, output.strip()) == (0, f"{[str(tmp_path / 'a')][:imports_from_there]}"), errors
