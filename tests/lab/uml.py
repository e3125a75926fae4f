"""Runs programs under Debian's user-mode Linux, a kernel that is an ordinary program.

It can mount what this machine's kernel may not support: shares of SMB and NFS.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).with_name("shares")
SOURCE = Path(__file__).resolve().parents[2] / "src"
KERNEL = "linux.uml"


def missing(programs: Sequence[str]) -> str:
    """Returns why the kernel cannot be started here; "" if it can."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    lacking = [name for name in (KERNEL, "gcc", *programs) if not shutil.which(name, path=path)]
    return f"not installed: {', '.join(lacking)}" if lacking else ""


def boot(folder: Path, *words: str, program: Path = HERE / "inside.py", memory: str = "1500M",
         timeout: float = 150) -> dict[str, Any]:  # fmt: skip
    """Runs a program under the kernel; returns the results of its trials.

    Args:
        folder: Empty folder for temporary files.
        words: Arguments of the program.
        program: Path of a Python script.
        memory: Limit of the kernel's memory, which is allocated on demand.
        timeout: Seconds.
    """
    text = (HERE / "boot.sh").read_text()
    values = {"SOURCE": SOURCE, "PYTHON": sys.executable, "INSIDE": program,
              "WORDS": " ".join(words)}  # fmt: skip
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    init, registers = folder / "boot.sh", folder / "floating_point.so"
    init.write_text(text)
    init.chmod(0o755)
    compiler = ["gcc", "-O2", "-shared", "-fPIC", "-o", str(registers)]
    subprocess.run([*compiler, str(HERE / "floating_point.c")], check=True)
    env = {**os.environ, "LD_PRELOAD": str(registers), "TMPDIR": str(folder)}
    argv = [KERNEL, f"mem={memory}", "rootfstype=hostfs", "rootflags=/", "ro", f"init={init}",
            "con0=fd:0,fd:1", "con=null", "quiet", f"uml_dir={folder}"]  # fmt: skip
    console = folder / "console.log"  # written while the kernel runs
    with console.open("wb") as file:
        child = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=file,
                                 stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
    try:
        child.wait(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    out = console.read_text(errors="replace")
    said = dict(json.loads(line[5:]) for line in out.splitlines() if line.startswith("SAID "))
    return {**said, "all": out}
