"""Plants faults in a copy of the package and checks that some environment of the matrix fails.

    python bench/matrix/planted.py [NAME …] [--out FILE]

A fault is a mistake that a developer may make who knows only one kind of site. The script tries it
in environments with a value that the fault does not expect, until one fails. It has the
requirements of ``bench/matrix/matrix.py``. The faults are text replacements in ``src/paceline``.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "matrix"
sys.path.insert(0, str(TESTS))
from environments import Environment, select  # noqa: E402

MAX_ENVIRONMENTS_TRIED = 4  # per fault


@dataclass(frozen=True)
class Fault:
    """A replacement of ``old`` by ``new``, and the environment values that it does not expect."""

    name: str
    file: str
    old: str
    new: str
    unexpected: tuple[tuple[str, str], ...]

    def plant(self, package: Path) -> None:
        """Replace the text in ``package``. Raises ValueError if the file does not contain it."""
        file = package / self.file
        text = file.read_text()
        if self.old not in text:
            raise ValueError(f"{self.name}: {self.file} has no {self.old!r}")
        file.write_text(text.replace(self.old, self.new))

    def concerns(self, environment: Environment) -> bool:
        values = environment.values()
        return environment.is_usable and any(value in values for value in self.unexpected)


_ENTRY, _MAIN = "agent/entry.py", "    role, *args ="


def _at_agent_start(statement: str) -> tuple[str, str, str]:
    """A replacement that runs a statement at the start of every agent process."""
    return _ENTRY, _MAIN, f"    {statement}\n{_MAIN}"


FAULTS = (
    Fault(
        "agents share a temporary path",
        "agent/files/snapshot.py",
        "    private.mkdir(mode=0o700)\n",
        '    private = folder.with_name(".new-" + folder.name)\n'
        "    shutil.rmtree(str(private), ignore_errors=True)\n"
        "    private.mkdir(mode=0o700)\n",
        (("home", "shared"), ("home", "moved")),
    ),
    Fault(
        "one agent for each /tmp",
        *_at_agent_start(
            "import fcntl; main.lock = open('/tmp/paceline.lock', 'a');"
            " fcntl.flock(main.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)"
            " if 'forkserver' not in sys.argv and 'guard' not in sys.argv else None"
        ),
        (("tmp", "shared"),),
    ),
    Fault(
        "the login shell is bash",
        "remote/openssh.py",
        '"--", host.address, *([f"exec {shell_text(remote)}"]',
        '"--", host.address, *(["[[ -n $HOME ]] && " + shell_text(remote)]',
        (("shell", "dash"), ("shell", "tcsh")),
    ),
    Fault(
        "start-up files print little",
        "agent/frames.py",
        "        self.noise += data[-MAX_NOISE_BYTES:]\n",
        "        self.noise += data[-MAX_NOISE_BYTES:]\n        assert len(self.noise) < 4096\n",
        (("startup", "prints"),),
    ),
    Fault(
        "nothing reads the agent's input before it",
        "remote/openssh.py",
        '''GUARD_LINE = b\'''',
        '''GUARD_LINE = b"" and b\'''',
        (("startup", "reads"),),
    ),
    Fault(
        "programs can be run in /tmp",
        "remote/openssh.py",
        '''    'for p in "$@"; do if command''',
        '''    'cp /bin/sh /tmp/paceline-$$ && /tmp/paceline-$$ -c true || exit 9; '
    'for p in "$@"; do if command''',
        (("tmp", "noexec"),),
    ),
    Fault(
        "users have the same name everywhere",
        "remote/openssh.py",
        'flags = {"-l": host.user,',
        'import getpass; flags = {"-l": host.user or getpass.getuser(),',
        (("user", "different"), ("user", "ordinary")),
    ),
    Fault(
        "homes have the same path everywhere",
        "agent/files/snapshot.py",
        'str(Path("~/.cache").expanduser())',
        '"/run/home/%s/.cache" % __import__("getpass").getuser()',
        (("home", "moved"),),
    ),
    Fault(
        "the umask is 022",
        "agent/bootstrap.py",
        "os.umask(0o077)",
        "os.umask(0)",
        (("umask", "000"),),
    ),
    Fault(
        "hosts have IPv4 addresses",
        "remote/network.py",
        "for family in (4, 6):",
        "for family in (4,):",
        (("network", "ipv6"), ("network", "mixed")),
    ),
    Fault(
        "hosts know each other by name",
        "agent/ranks/process.py",
        "    original = distributed.init_process_group\n",
        "    original = distributed.init_process_group\n"
        "    __import__('socket').getaddrinfo(os.environ['PACELINE_HOST'], 1)\n",
        (("names", "unknown"),),
    ),
    Fault(
        "interpreters have the same path everywhere",
        "remote/openssh.py",
        '_FIND_PYTHON, "paceline", python,',
        '_FIND_PYTHON, "paceline", __import__("sys").executable,',
        (("python", "different"),),
    ),
    Fault(
        "there is room in /dev/shm",
        *_at_agent_start("open('/dev/shm/paceline-%d' % os.getpid(), 'wb').write(bytes(1 << 20))"),
        (("shm", "small"),),
    ),
    Fault(
        "there is room in the home",
        *_at_agent_start(
            "open(os.path.expanduser('~/.paceline-%d' % os.getpid()), 'wb').write(bytes(128 << 20))"
        ),
        (("quota", "small"),),
    ),
    Fault(
        "there is a second CPU",
        *_at_agent_start("1 // (len(os.sched_getaffinity(0)) - 1)"),
        (("cpus", "one"),),
    ),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="faults (parts of their names); default: all")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    selection = dict(enumerate(select(), 1))
    lines = [f"# Planted faults, {datetime.date.today()}", "", platform.platform(), ""]
    lines += ["| fault | environments tried | found in | by journey |", "|---|---|---|---|"]
    num_undetected = 0
    for fault in FAULTS:
        if options.names and not any(name in fault.name for name in options.names):
            continue
        num_tried, number, journey = find_failure(fault, selection)
        num_undetected += not number
        lines.append(f"| {fault.name} | {num_tried} | {number or 'none'} | {journey} |")
        print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    return int(num_undetected > 0)


def find_failure(fault: Fault, selection: dict[int, Environment]) -> tuple[int, int, str]:
    """Number of environments tried, the one that failed (or 0), and its first failed journey."""
    candidates = [number for number in selection if fault.concerns(selection[number])]
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        Path(folder).chmod(0o755)
        package = Path(folder, "paceline")
        shutil.copytree(ROOT / "src" / "paceline", package, ignore=shutil.ignore_patterns("*.pyc"))
        fault.plant(package)
        for num_tried, number in enumerate(candidates[:MAX_ENVIRONMENTS_TRIED], 1):
            if journey := first_failure(number, folder):
                return num_tried, number, journey
    return min(len(candidates), MAX_ENVIRONMENTS_TRIED), 0, "none"


def first_failure(number: int, source: str) -> str:
    """First journey that fails in an environment with the package in ``source``; empty if none."""
    argv = [sys.executable, "-m", "pytest", "-n", "1", "-q", str(TESTS / "test_matrix.py")]
    variables = {
        **os.environ, "CI": "true", "PACELINE_MATRIX": str(number),
        "PACELINE_MATRIX_SOURCE": source, "PACELINE_MATRIX_FIRST": "1",
    }  # fmt: skip
    completed = subprocess.run(argv, cwd=ROOT, env=variables, capture_output=True, text=True)
    match = re.search(r"^failed journey: (\w+): .*", completed.stdout, re.MULTILINE)
    if completed.returncode and not match:
        raise RuntimeError(completed.stdout)
    if match is None:
        return ""
    print(f"  environment {number}: {match[0]}", flush=True)
    return match[1]


if __name__ == "__main__":
    sys.exit(main())
