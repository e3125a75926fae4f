"""Types the commands of the first-run tutorial, from first to last, in an empty folder."""

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
FAILURE_PREFIXES = (
    "will fail:",
    "paceline: failed first:",
)  # starts of lines in failing commands' output
TIMEOUT_S = 200


def test_tutorial_output(tmp_path: Path) -> None:
    reason = Lab.available()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path / "project"
    folder.mkdir()
    programs = Path(sys.executable).parent
    inherited_env = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    environment = {**inherited_env, "PATH": f"{programs}:{os.environ['PATH']}", "COLUMNS": "200",
                   "PYTHONPATH": str(SOURCE), "XDG_RUNTIME_DIR": str(tmp_path)}  # fmt: skip
    try:
        for language, name, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
            if name:
                write(folder / name, language, text.splitlines())
                continue
            for command, expected in commands(text):
                result = subprocess.run(
                    ["bash", "-c", command], cwd=folder, env=environment, text=True, check=False,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S,
                )  # fmt: skip
                fails = any(line.startswith(FAILURE_PREFIXES) for line in expected)
                assert (result.returncode != 0) == fails, f"{command}\n{result.stdout}"
                printed = {normalized(line) for line in result.stdout.splitlines()}
                missing = {normalized(line) for line in expected} - printed - {"…", ""}
                assert not missing, f"{command}\n{result.stdout}"
    finally:
        down = [str(programs / "paceline"), "lab", "down"]
        subprocess.run(down, env=environment, check=False, capture_output=True, timeout=TIMEOUT_S)


def write(file: Path, language: str, lines: list[str]) -> None:
    """Writes a file that the page shows, or applies a diff to it."""
    if language == "diff":
        lines, _ = applied(file.read_text().splitlines(), lines)
    file.write_text("\n".join(lines) + "\n")


def commands(block: str) -> list[tuple[str, list[str]]]:
    """Returns the commands of a console block, each with the output shown below it."""
    parsed: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            parsed.append((line[2:], []))
        else:
            parsed[-1][1].append(line)
    return parsed


def normalized(line: str) -> str:
    """Returns a line without what differs between runs: numbers, host names, first failed rank."""
    host = re.escape(os.uname().nodename.split(".")[0])
    line = re.sub(rf"\b{host}\b", "myhost", line)
    # On a busy machine, a rank may be slow. The rank that fails first may still be running when its
    # error is known, so that the other one is ended before it fails, too.
    line = re.sub(r"; rank \d on n\d held the others up| \(exit status 1\)", "", line)
    line = re.sub(r"^ +1 other rank failed after it$", "", line)
    return re.sub(r"\d[\d.,]*", "0", line)
