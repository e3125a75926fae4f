"""Every program that code or tests start is installed by the two commands, or is in any Debian.

A program is found as the first word of a list in a call that starts something. One that is not in
``FROM`` fails this test: add it, with the Debian package that has it, and the package to
tools/system-parts.sh if no Debian is without it.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

REPOSITORY = Path(__file__).resolve().parents[2]

# the names under which something is started, here, on a lab host or on a node
STARTS = {"run", "Popen", "popen", "check_call", "check_output", "call", "exec", "execv", "execvp",
          "create_subprocess_exec", "which", "find", "output", "OnSwitch", "OnHost", "_popen",
          "_run", "_execute"}  # fmt: skip

# essential or required in Debian, or on any Linux that has a shell
ANY_DEBIAN = {"bash", "cat", "find", "ldd", "mount", "rm", "sh", "sleep", "tar", "test",
              "true", "umount", "unshare", "yes"}  # fmt: skip

# what the README asks for before the two commands
ASKED_FOR = {"git": "git", "make": "make", "python": "python3", "python3": "python3"}

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

# looked for and done without, each with a sentence that says so; rpc.mountd is for a bench alone
OPTIONAL = {"iperf3", "mpiexec", "mpirun", "nvidia-smi", "rpc.mountd"}


def test_every_program_has_a_package() -> None:
    known = ANY_DEBIAN | ASKED_FOR.keys() | FROM.keys() | OPTIONAL
    unknown = {name: where for name, where in started().items() if name not in known}
    assert unknown == {}


def test_every_package_is_installed() -> None:
    parts = (REPOSITORY / "tools" / "system-parts.sh").read_text()
    installed = set(re.findall(r"([a-z0-9.+-]+):\S+", parts))
    assert set(FROM.values()) <= installed


def test_what_is_not_installed_by_the_commands_is_asked_for() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    for package in {*ASKED_FOR.values(), "python3-venv"}:
        assert package in readme
    fresh = (REPOSITORY / "tools" / "fresh-machine.sh").read_text()
    first = re.search(r'^first="([^"]+)"', fresh, re.MULTILINE)
    assert first is not None
    assert {*ASKED_FOR.values(), "python3-venv"} <= set(first[1].split(","))


def test_the_list_of_parts_is_valid_shell() -> None:
    for name in ("system-parts.sh", "fresh-machine.sh"):
        subprocess.run(["sh", "-n", REPOSITORY / "tools" / name], check=True)


def started() -> dict[str, str]:
    """Every program by name, with one file that starts it."""
    found = {}
    for folder in ("src", "tests", "tools"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            for name in programs(ast.parse(path.read_text(encoding="utf-8"))):
                found[name] = str(path.relative_to(REPOSITORY))
    return found


def programs(tree: ast.AST) -> Iterator[str]:
    """First words of the lists in calls that start something, and names that are looked for."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or _name(call.func) not in STARTS:
            continue
        for argument in call.args:
            if isinstance(argument, ast.List | ast.Tuple) and argument.elts:
                argument = argument.elts[0]
            elif _name(call.func) not in ("which", "execvp", "create_subprocess_exec"):
                continue
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                word = PurePosixPath(argument.value).name
                if re.fullmatch(r"(?!no-such)[a-z][a-z0-9._-]*", word):
                    yield word


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def test_a_program_begins_when_all_of_its_file_is_known() -> None:
    """What stands below the line that runs it would not exist yet."""
    early = []
    for path in (REPOSITORY / "src").rglob("*.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        early += [
            str(path)
            for node in body[:-1]
            if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        ]
    assert early == []
