"""Kills parts of a job of a plain script at random moments: what is lost, and what the rerun does.

``python bench/plain_scripts/kills.py [--times 10] [--seed 1] [--kinds launcher,other,first]
[--steps 300] [--pause 0.05] [--script resume_own.py]``

The script is one of the tests, or of the page on trainers (``trainer.py``, ``sft.py``,
``with_accelerate.py``), which then waits after each step and says at its end what it has trained.

Two hosts of a lab do not see the project. ``launcher`` kills the launcher with SIGKILL and types
the same command again. ``other`` and ``first`` switch off the host of rank 1 or of rank 0, and on
again after a few seconds; the job goes on by itself (``--nnodes 1:2``). Printed as Markdown, one
line a kill: the moment, the newest checkpoint here at that time, the steps at which the ranks began
again, whether they began at the same one, whether the replicas are equal at the end, and whether a
file of the user was changed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.lab import Lab, LabOptions

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests/lab/jobs"
PAGE = ROOT / "docs/how-to/trainers.md"
FRAMEWORKS = Path("/opt/paceline-test/frameworks")  # trl is there: tools/system-parts.sh
TRL = "sft.py"
BEGINS = re.compile(
    r"(?:rank \d of \d from step |resumes from \S*checkpoint-|starts at step )(\d+)"
)
SAVED = re.compile(r"(?:ckpt_|checkpoint-|step_)(\d+)(?:\.pt)?")
SLOWED = """
import atexit, hashlib, os, time, torch
from torch.optim.optimizer import register_optimizer_step_post_hook
trained = []
def wait(optimizer, *_):
    trained[:] = [group["params"] for group in optimizer.param_groups]
    time.sleep({pause})
def tell():
    weights = torch.cat([tensor.detach().flatten() for group in trained for tensor in group])
    print("rank", os.environ["RANK"], "ends", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
register_optimizer_step_post_hook(wait)
atexit.register(tell)
"""
KINDS = ("launcher", "other", "first")
MAX_START_S = 120.0
MAX_RUN_S = 400.0
OFF_S = 6.0  # for which a host is off
MAX_MOMENT_S = 12.0  # after the first checkpoint is here


@dataclass(frozen=True)
class Kill:
    """One kill and what followed."""

    kind: str
    moment_s: float
    newest: int
    begins: tuple[int, ...]
    are_alike: bool
    is_equal: bool
    is_intact: bool
    problem: str = ""

    def row(self) -> str:
        """A line of the table."""
        marks = ["yes" if mark else "**no**" for mark in (self.are_alike, self.is_equal,
                                                         self.is_intact)]  # fmt: skip
        begins = ", ".join(map(str, self.begins)) or "none"
        cells = [self.kind, f"{self.moment_s:.1f}", str(self.newest), begins, *marks, self.problem]
        return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--pause", type=float, default=0.05)
    parser.add_argument("--script", default="resume_own.py")
    options = parser.parse_args()
    moments = random.Random(options.seed)
    print("| killed | s after the first checkpoint | newest here | began again at | same step |"
          " equal replicas | user's files intact | problem |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|", flush=True)
    kills = []
    words = [options.script, str(options.steps), "10", str(options.pause)]  # 10: steps of a save
    with Lab(LabOptions(hosts=2)) as lab:
        for kind in options.kinds.split(","):
            for _ in range(options.times):
                kills.append(strike(lab, kind, moments.uniform(0, MAX_MOMENT_S), words))
                print(kills[-1].row(), flush=True)
                lab.heal()
    good = sum(kill.are_alike and kill.is_equal and kill.is_intact for kill in kills)
    print(f"\n{good} of {len(kills)} went on from one checkpoint to equal replicas")
    return 0 if good == len(kills) else 1


def strike(lab: Lab, kind: str, moment_s: float, words: Sequence[str]) -> Kill:
    """Runs the script in a fresh project, kills once, and lets it end."""
    with tempfile.TemporaryDirectory() as folder:
        project, run, log = Path(folder, "project"), Path(folder, "run"), Path(folder, "log")
        project.mkdir()
        write_script(project, *words)
        packages = ["--env", f"PYTHONPATH={FRAMEWORKS}"] if words[0] == TRL else []
        (project / "mine.txt").write_text("mine")
        (project / "out").mkdir()
        (project / "out/notes.txt").write_text("mine")
        nodes = [] if kind == "launcher" else ["--nnodes", "1:2"]
        argv = [sys.executable, "-m", "paceline", "run", "-H", "n1,n2", "--ssh-config",
                str(lab.ssh_config), "--run-dir", str(run), "--lease", "4",
                "--env", "HF_HUB_OFFLINE=1", *packages, *nodes, *words]  # fmt: skip
        problem, status, newest_step, offset = "", 1, 0, 0
        process = start(argv, project, log)
        try:
            wait_until(lambda: newest(project) > 0 or process.poll() is not None)
            time.sleep(moment_s)
            newest_step, offset = newest(project), log.stat().st_size
            if kind == "launcher":
                process.kill()
                process.wait()
                time.sleep(8.0)  # the hosts notice it
                newest_step = newest(project)
                process = start(argv, project, log)
            else:
                host = "n1" if kind == "first" else "n2"
                lab.fault("power-off", host)
                time.sleep(OFF_S)
                lab.undo("power-off", host)
            status = process.wait(MAX_RUN_S)
        except (subprocess.TimeoutExpired, TimeoutError) as error:
            problem = type(error).__name__
        finally:
            process.kill()
            process.wait()
        text = log.read_text(errors="replace")
        begins = BEGINS.findall(text.encode()[offset:].decode(errors="replace"))
        ends = re.findall(r"rank \d ends (\w+)", text)
        if status and not problem:
            lines = text.splitlines()
            problem = next((line for line in lines if "failed first" in line), (lines or [""])[-1])
        notes = [project / "mine.txt", project / "out/notes.txt"]
        return Kill(
            kind, moment_s, newest_step, tuple(map(int, begins)),
            "resume at different steps" not in text and bool(begins)
            and all(int(step) >= newest_step for step in begins),
            not status and len(set(ends)) == 1,
            all(note.read_text() == "mine" for note in notes), problem[:100].replace("|", "/"),
        )  # fmt: skip


def start(argv: Sequence[str], project: Path, log: Path) -> subprocess.Popen[bytes]:
    """Starts the launcher; its output is appended to ``log``."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    with log.open("ab") as output:
        return subprocess.Popen(argv, cwd=project, env=env, stdin=subprocess.DEVNULL,
                                stdout=output, stderr=output, start_new_session=True)  # fmt: skip


def write_script(project: Path, name: str, steps: str, every: str, pause: str) -> None:
    """Writes a script, and what it needs, into a project."""
    pages = dict(re.findall(r"^```python file=(\S+)\n(.*?)^```$", PAGE.read_text("utf-8"),
                            re.MULTILINE | re.DOTALL))  # fmt: skip
    if name not in pages:
        shutil.copy(SCRIPTS / name, project)
        return
    text = pages[name].replace("max_steps=20", f"max_steps={steps}")
    text = text.replace("save_steps=10", f"save_steps={every}").replace(
        "step == 20", f"step == {steps}")  # fmt: skip
    (project / name).write_text(SLOWED.format(pause=pause) + text)
    if name == TRL:
        sys.path.insert(0, str(ROOT / "tests/unit"))
        tiny_language_model = importlib.import_module("tiny_language_model")
        tiny_language_model.save(project / "HuggingFaceTB/SmolLM2-135M-Instruct")
        tiny_language_model.write_jsonl(project / "chat.jsonl", tiny_language_model.chats(24))


def newest(project: Path) -> int:
    """The step of the newest checkpoint in the project; 0 without any."""
    names = [SAVED.fullmatch(path.name) for path in project.glob("out/**/*")]
    return max((int(name[1]) for name in names if name), default=0)


def wait_until(condition: object) -> None:
    """Waits until a function returns true. TimeoutError if that takes too long."""
    assert callable(condition)
    deadline = time.monotonic() + MAX_START_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
