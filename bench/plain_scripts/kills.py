"""Kills parts of a job of a plain script at random moments and checks that it resumes correctly.

``python bench/plain_scripts/kills.py [--times 10] [--seed 1] [--kinds launcher,other,first]
[--steps 300] [--pause 0.05] [--script resume_own.py]``

The script is one of the tests' jobs or of the documentation page on trainers (``trainer.py``,
``sft.py``, ``with_accelerate.py``). Scripts of the page get a pause after each step, and print a
hash of their weights at the end.

The project folder is not shared with the two lab hosts. ``launcher`` kills the launcher with
SIGKILL and runs the same command again. ``other`` and ``first`` power off the host of rank 1 or of
rank 0 for a few seconds; the job continues by itself (``--nnodes 1:2``). Prints as Markdown, one
row per kill: the moment, the newest local checkpoint at that time, the steps at which the ranks
started again, whether these agree, whether the replicas are equal at the end, and whether the
user's files are unchanged.
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
FRAMEWORKS = Path("/opt/paceline-test/frameworks")  # has trl: tools/system-parts.sh
TRL = "sft.py"
STARTED_AT = re.compile(
    r"(?:rank \d of \d from step |resumes from \S*checkpoint-|starts at step )(\d+)"
)
SAVED = re.compile(r"(?:ckpt_|checkpoint-|step_)(\d+)(?:\.pt)?")
SLOW_PREFIX = """
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
OFF_S = 6.0  # time for which a host is off
MAX_MOMENT_S = 12.0  # after the first local checkpoint


@dataclass(frozen=True)
class Kill:
    """One kill and its result."""

    kind: str
    moment_s: float
    newest_step: int
    start_steps: tuple[int, ...]
    starts_agree: bool
    is_equal: bool
    is_intact: bool
    problem: str = ""

    def row(self) -> str:
        """A row of the table."""
        marks = ["yes" if is_true else "**no**" for is_true in (self.starts_agree, self.is_equal,
                                                         self.is_intact)]  # fmt: skip
        steps_cell = ", ".join(map(str, self.start_steps)) or "none"
        cells = [
            self.kind,
            f"{self.moment_s:.1f}",
            str(self.newest_step),
            steps_cell,
            *marks,
            self.problem,
        ]
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
    rng = random.Random(options.seed)
    print("| killed | s after the first checkpoint | newest local step | restarted at | same step |"
          " equal replicas | user's files intact | problem |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|", flush=True)
    kills = []
    save_steps = "10"  # steps between checkpoints
    script_arguments = [options.script, str(options.steps), save_steps, str(options.pause)]
    with Lab(LabOptions(hosts=2)) as lab:
        for kind in options.kinds.split(","):
            for _ in range(options.times):
                kills.append(kill_once(lab, kind, rng.uniform(0, MAX_MOMENT_S), script_arguments))
                print(kills[-1].row(), flush=True)
                lab.heal()
    num_passed = sum(kill.starts_agree and kill.is_equal and kill.is_intact for kill in kills)
    print(
        f"\n{num_passed} of {len(kills)} resumed from one checkpoint and ended with equal replicas"
    )
    return 0 if num_passed == len(kills) else 1


def kill_once(lab: Lab, kind: str, moment_s: float, script_arguments: Sequence[str]) -> Kill:
    """Run the script in a new project, kill once, and wait for its end."""
    with tempfile.TemporaryDirectory() as folder:
        project, run, log = Path(folder, "project"), Path(folder, "run"), Path(folder, "log")
        project.mkdir()
        write_script(project, *script_arguments)
        packages = ["--env", f"PYTHONPATH={FRAMEWORKS}"] if script_arguments[0] == TRL else []
        (project / "mine.txt").write_text("mine")
        (project / "out").mkdir()
        (project / "out/notes.txt").write_text("mine")
        nodes = [] if kind == "launcher" else ["--nnodes", "1:2"]
        argv = [sys.executable, "-m", "paceline", "run", "-H", "n1,n2", "--ssh-config",
                str(lab.ssh_config), "--run-dir", str(run), "--lease", "4",
                "--env", "HF_HUB_OFFLINE=1", *packages, *nodes, *script_arguments]  # fmt: skip
        problem, status, newest_step, offset = "", 1, 0, 0
        process = start(argv, project, log)
        try:
            wait_until(lambda: newest_checkpoint(project) > 0 or process.poll() is not None)
            time.sleep(moment_s)
            newest_step, offset = newest_checkpoint(project), log.stat().st_size
            if kind == "launcher":
                process.kill()
                process.wait()
                time.sleep(8.0)  # until the hosts notice it
                newest_step = newest_checkpoint(project)
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
        start_steps = STARTED_AT.findall(text.encode()[offset:].decode(errors="replace"))
        digests = re.findall(r"rank \d ends (\w+)", text)
        if status and not problem:
            lines = text.splitlines()
            problem = next((line for line in lines if "failed first" in line), (lines or [""])[-1])
        user_files = [project / "mine.txt", project / "out/notes.txt"]
        return Kill(
            kind, moment_s, newest_step, tuple(map(int, start_steps)),
            "resume at different steps" not in text and bool(start_steps)
            and all(int(step) >= newest_step for step in start_steps),
            not status and len(set(digests)) == 1,
            all(path.read_text() == "mine" for path in user_files), problem[:100].replace("|", "/"),
        )  # fmt: skip


def start(argv: Sequence[str], project: Path, log: Path) -> subprocess.Popen[bytes]:
    """Starts the launcher; its output is appended to ``log``."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    with log.open("ab") as output:
        return subprocess.Popen(argv, cwd=project, env=env, stdin=subprocess.DEVNULL,
                                stdout=output, stderr=output, start_new_session=True)  # fmt: skip


def write_script(project: Path, name: str, steps: str, save_steps: str, pause: str) -> None:
    """Write a script and its files into a project."""
    pages = dict(re.findall(r"^```python file=(\S+)\n(.*?)^```$", PAGE.read_text("utf-8"),
                            re.MULTILINE | re.DOTALL))  # fmt: skip
    if name not in pages:
        shutil.copy(SCRIPTS / name, project)
        return
    text = pages[name].replace("max_steps=20", f"max_steps={steps}")
    text = text.replace("save_steps=10", f"save_steps={save_steps}").replace(
        "step == 20", f"step == {steps}")  # fmt: skip
    (project / name).write_text(SLOW_PREFIX.format(pause=pause) + text)
    if name == TRL:
        sys.path.insert(0, str(ROOT / "tests/unit"))
        tiny_language_model = importlib.import_module("tiny_language_model")
        tiny_language_model.save(project / "HuggingFaceTB/SmolLM2-135M-Instruct")
        tiny_language_model.write_jsonl(project / "chat.jsonl", tiny_language_model.chats(24))


def newest_checkpoint(project: Path) -> int:
    """Step of the newest checkpoint in the project; 0 if there is none."""
    names = [SAVED.fullmatch(path.name) for path in project.glob("out/**/*")]
    return max((int(name[1]) for name in names if name), default=0)


def wait_until(condition: object) -> None:
    """Wait until a function returns true. Raises TimeoutError after MAX_START_S."""
    assert callable(condition)
    deadline = time.monotonic() + MAX_START_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
