"""Tests which data of a run other users of a host can read, during the run and afterwards."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SECRET = "secret-0123456789abcdef"
TIMEOUT_S = 120.0

# The rank lists all processes of the job while they run.
SCRIPT = """
import os, pathlib
assert os.environ["TEST_SECRET"].startswith("secret-")
pathlib.Path("result.txt").write_text("of the script\\n")
lines = []
for process in pathlib.Path("/proc").iterdir():
    if process.name.isdigit():
        try:
            arguments = (process / "cmdline").read_text(errors="replace")
            if os.environ["TEST_SECRET"] in (process / "environ").read_text(errors="replace"):
                lines.append(arguments)
        except OSError:
            pass
pathlib.Path(os.environ["TEST_LIST"]).write_text("\\n".join(lines))
print("done")
"""


def readable_files(folder: Path) -> Iterator[Path]:
    """Yields the files below ``folder`` that other users can read."""
    for path in folder.iterdir():
        mode = stat.S_IMODE(path.lstat().st_mode)
        if path.is_symlink():
            continue
        if path.is_dir():
            if mode & 0o005:
                yield from readable_files(path)
        elif mode & 0o006:
            yield path


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_run_is_unreadable_for_foreign_users(tmp_path: Path, umask: int) -> None:
    project, home, temporary = (tmp_path / name for name in ("project", "home", "tmp"))
    for folder in (project, home, temporary):
        folder.mkdir()
        folder.chmod(0o777)
    script, listing = project / "script.py", tmp_path / "listing"
    script.write_text(SCRIPT)
    environ = {
        "PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(temporary),
        "TEST_SECRET": SECRET, "TEST_LIST": str(listing),
    }  # fmt: skip
    command = [sys.executable, "-m", "paceline", "run", "-H", "localhost", "--no-torch"]
    result = subprocess.run(
        [*command, "--env", "TEST_SECRET", "--env", "TEST_LIST", "script.py"],
        cwd=project, env=environ, umask=umask, capture_output=True, text=True, timeout=TIMEOUT_S,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    processes = listing.read_text().splitlines()
    assert len(processes) >= 2  # at least launcher and rank
    assert SECRET not in listing.read_text()
    expected = {script, project / "result.txt"}
    assert {*readable_files(project), *readable_files(home), *readable_files(temporary)} <= expected
