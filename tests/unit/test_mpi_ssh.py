"""The ssh of mpiexec: what arrives at the remote command, under several login shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.schedulers import mpi_ssh

FAKE_SSH = """#!/bin/sh
printf '%s\\n' "$@" >"$PLACE/arguments"
for command do :; done
exec "$SHELL" -c "$command"
"""


@pytest.mark.parametrize("shell", ["sh", "bash", "csh", "fish"])
def test_remote_command_gets_key_and_login_shell(tmp_path: Path, shell: str) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"no {shell}")
    (tmp_path / "ssh").write_text(FAKE_SSH)
    (tmp_path / "ssh").chmod(0o700)
    (tmp_path / "key").write_text("5ecret\n")
    options = ["-x", "-q", "-F", "/c/ssh config"]
    command = ["  env", "'KEPT=a b'", '"QUOTED=it\'s"']
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SHELL": path, "PLACE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-I", mpi_ssh.__file__, str(tmp_path / "key"), "T_KEY", *options, "n2",
         *command], env=environ, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert {"T_KEY=5ecret", "KEPT=a b", "QUOTED=it's"} <= {*done.stdout.splitlines()}
    arguments = (tmp_path / "arguments").read_text()
    assert arguments.startswith("\n".join([*options, "n2", "exec "]))
    assert "5ecret" not in arguments
