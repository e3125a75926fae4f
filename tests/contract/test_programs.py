"""Tests that every program that code or tests start is installed by the README or part of Debian.

A program is the first word of a list in a call that starts a process. If a program is missing in
``FROM``, add it with its Debian package, and add the package to tools/system-parts.sh unless
every Debian has it.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

REPOSITORY = Path(__file__).resolve().parents[2]

# functions that start programs here, on a lab host or on a node
STARTS = {"run", "Popen", "popen", "check_call", "check_output", "call", "exec", "execv", "execvp",
          "create_subprocess_exec", "which", "find", "output", "OnSwitch", "OnHost", "_popen",
          "_run", "_execute"}  # fmt: skip

# in every Debian (essential or required), or on any Linux with a shell
ANY_DEBIAN = {"bash", "cat", "find", "ldd", "mount", "rm", "sh", "sleep", "tar", "test",
              "true", "umount", "unshare", "yes"}  # fmt: skip

# prerequisites in the README
PREREQUISITES = {"git": "git", "make": "make", "python": "python3", "python3": "python3"}

# program → the package in tools/system-parts.sh
FROM = {
    "ssh": "openssh-client", "ssh-add": "openssh-client", "ssh-keygen": "openssh-client",
    "sshd": "openssh-server", "ip": "iproute2", "tc": "iproute2", "ss": "iproute2",
    "iptables": "iptables", "nft": "nftables", "ps": "procps", "kill": "procps", "tmux": "tmux",
    "openssl": "openssl", "mpiexec.hydra": "mpich", "mpiexec.openmpi": "openmpi-bin",
    "sbatch": "slurm-wlm", "scancel": "slurm-wlm", "salloc": "slurm-wlm", "srun": "slurm-wlm",
    "slurmd": "slurm-wlm", "slurmctld": "slurm-wlm", "munged": "munge", "docker": "docker.io",
    "dockerd": "docker.io", "smbd": "samba", "fsfreeze": "util-linux", "mkfs.ext4": "e2fsprogs",
}  # fmt: skip

# optional: a message says if one is missing; only a benchmark uses rpc.mountd
OPTIONAL = {"iperf3", "mpiexec", "mpirun", "nvidia-smi", "rpc.mountd"}


def test_programs_have_packages() -> None:
    expected = ANY_DEBIAN | PREREQUISITES.keys() | FROM.keys() | OPTIONAL
    unknown = {name: file for name, file in started_programs().items() if name not in expected}
    assert unknown == {}


def test_packages_are_installed() -> None:
    parts = (REPOSITORY / "tools" / "system-parts.sh").read_text()
    installed = set(re.findall(r"([a-z0-9.+-]+):\S+", parts))
    assert set(FROM.values()) <= installed


def test_readme_lists_prerequisites() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    for package in {*PREREQUISITES.values(), "python3-venv"}:
        assert package in readme
    script = (REPOSITORY / "tools" / "fresh-machine.sh").read_text()
    first = re.search(r'^first="([^"]+)"', script, re.MULTILINE)
    assert first is not None
    assert {*PREREQUISITES.values(), "python3-venv"} <= set(first[1].split(","))


def test_system_scripts_are_valid_shell() -> None:
    for name in ("system-parts.sh", "fresh-machine.sh"):
        subprocess.run(["sh", "-n", REPOSITORY / "tools" / name], check=True)


def started_programs() -> dict[str, str]:
    """Returns every started program by name, with one file that starts it."""
    files = {}
    for folder in ("src", "tests", "tools"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            for name in programs(ast.parse(path.read_text(encoding="utf-8"))):
                files[name] = str(path.relative_to(REPOSITORY))
    return files


def programs(tree: ast.AST) -> Iterator[str]:
    """Yields the first words of lists in calls that start programs, and names that are searched."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or _name(call.func) not in STARTS:
            continue
        for argument in call.args:
            if isinstance(argument, ast.List | ast.Tuple) and argument.elts:
                argument = argument.elts[0]
            elif _name(call.func) not in ("which", "execvp", "create_subprocess_exec"):
                continue
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                program = PurePosixPath(argument.value).name
                if re.fullmatch(r"(?!no-such)[a-z][a-z0-9._-]*", program):
                    yield program


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def test_main_guard_is_last_statement() -> None:
    """Definitions below the line that runs the program would not exist yet."""
    offenders = []
    for path in (REPOSITORY / "src").rglob("*.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        offenders += [
            str(path)
            for node in body[:-1]
            if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        ]
    assert offenders == []
