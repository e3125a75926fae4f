"""What `make pythons` does: the unit tests under every supported Python that this machine has.

Takes the interpreters on PATH and those of pyenv. Torch is left out, for its newest release has
no build for each of them: what needs it is not collected there, and the main environment runs it.
Each Python also serves as a node's interpreter, 3.9 too, which agents still run on.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
OF_NODES = ("3.9", *SUPPORTED)
TESTING = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
ROOT = Path(__file__).resolve().parents[1]
JOB = "import os, sys; print('node', os.environ['RANK'], '%d.%d' % sys.version_info[:2])"


def main() -> int:
    """The exit status: 0 when all that could be had passed."""
    found = {version: find(version) for version in OF_NODES}
    failed = []
    for version, interpreter in found.items():
        if interpreter is None:
            print(f"Python {version}: not on this machine", flush=True)
            continue
        print(f"Python {version}: {interpreter}", flush=True)
        if not serves_as_node(version, interpreter):
            failed.append(f"{version} as a node's")
        if version in SUPPORTED and not passes(environment(version, interpreter)):
            failed.append(version)
    lacking = [version for version in SUPPORTED if found[version] is None]
    print(
        f"could not be had: {', '.join(lacking) or 'none'}; failed: {', '.join(failed) or 'none'}"
    )
    return 1 if failed else 0


def find(version: str) -> str | None:
    """An interpreter of that version which really starts."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path("~/.pyenv").expanduser()) / "versions"
    candidates = [shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python")]
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    for candidate in filter(None, candidates):
        done = subprocess.run([candidate, "-c", ask], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return str(candidate)
    return None


def environment(version: str, interpreter: str) -> Path:
    """A virtual environment with Paceline and what tests it, but no torch; its interpreter."""
    folder = ROOT / ".venv-pythons" / version
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-e", str(ROOT), *TESTING], check=True)
    return python


def passes(python: Path) -> bool:
    """Runs the unit tests."""
    argv = [str(python), "-m", "pytest", "-q", "-n", "auto", "-p", "without_torch", "tests/unit"]
    path = {"PYTHONPATH": str(ROOT / "tests")}
    return subprocess.run(argv, cwd=ROOT, env={**os.environ, **path}, check=False).returncode == 0


def serves_as_node(version: str, interpreter: str) -> bool:
    """Two ranks of a job under that interpreter, started from this one."""
    script = ROOT / ".venv-pythons" / "job.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(JOB)
    argv = [sys.executable, "-m", "paceline", "run", "-p", "2", "--python", interpreter,
            "--no-torch", "--run-dir", f"run-{version}", script.name]  # fmt: skip
    done = subprocess.run(argv, cwd=script.parent, capture_output=True, text=True, check=False)
    shutil.rmtree(script.parent / f"run-{version}", ignore_errors=True)
    lines = sorted(line.split("] ")[-1] for line in done.stdout.splitlines())
    if lines == [f"node {rank} {version}" for rank in range(2)]:
        return True
    print(done.stdout + done.stderr)
    return False


if __name__ == "__main__":
    sys.exit(main())
