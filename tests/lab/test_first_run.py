"""The tutorial of the first run, typed from its first command to its last in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))
from launches import SOURCE
from test_tutorial import applied

from documents import REPOSITORY
from paceline.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.slow]

PAGE = REPOSITORY / "docs" / "tutorial" / "first-run.md"
BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FAILING = ("will fail:", "paceline: failed first:")  # how the output of a failing command begins
TIMEOUT_S = 200


def test_as_typed(tmp_path: Path) -> None:
    reason = Lab.available()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path / "project"
    folder.mkdir()
    programs = Path(sys.executable).parent
    own = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    environment = {**own, "PATH": f"{programs}:{os.environ['PATH']}", "COLUMNS": "200",
                   "PYTHONPATH": str(SOURCE), "XDG_RUNTIME_DIR": str(tmp_path)}  # fmt: skip
    try:
        for language, name, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
            if name:
                write(folder / name, language, text.splitlines())
                continue
            for command, expected in commands(text):
                done = subprocess.run(
                    ["bash", "-c", command], cwd=folder, env=environment, text=True, check=False,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S,
                )  # fmt: skip
                fails = any(line.startswith(FAILING) for line in expected)
                assert (done.returncode != 0) == fails, f"{command}\n{done.stdout}"
                printed = {normalized(line) for line in done.stdout.splitlines()}
                missing = {normalized(line) for line in expected} - printed - {"…", ""}
                assert not missing, f"{command}\n{done.stdout}"
    finally:
        down = [str(programs / "paceline"), "lab", "down"]
        subprocess.run(down, env=environment, check=False, capture_output=True, timeout=TIMEOUT_S)


def write(file: Path, language: str, lines: list[str]) -> None:
    """Writes a file that the page spells out, or changes it by a diff."""
    if language == "diff":
        lines, _ = applied(file.read_text().splitlines(), lines)
    file.write_text("\n".join(lines) + "\n")


def commands(block: str) -> list[tuple[str, list[str]]]:
    """The commands of a console block, each with the output shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def normalized(line: str) -> str:
    """A line without what differs from run to run: numbers, host names, which rank was first."""
    host = re.escape(os.uname().nodename.split(".")[0])
    line = re.sub(rf"\b{host}\b", "myhost", line)
    # a busy machine may slow a rank down, and the rank that fails first may still be running when
    # its error is known, so that the other one is ended before it fails, too
    line = re.sub(r"; rank \d on n\d held the others up| \(exit status 1\)", "", line)
    line = re.sub(r"^ +1 other rank failed after it$", "", line)
    return re.sub(r"\d[\d.,]*", "0", line)
