"""Success rate of starts on hosts that share a home directory but not the project.

The home is on this machine's disk, or on NFS: then every host mounts it from the kernel's server,
under user-mode Linux. The NFS part needs the packages user-mode-linux and nfs-kernel-server and a C
compiler. Every second start has an empty cache.

    python bench/shared_home/shared_home.py [--hosts 3] [--times 50] [--nfs-times 10] [--out FILE]
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
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

LAB_TESTS = Path(__file__).parents[2] / "tests" / "lab"
SCRIPT = "import os\nimport module12\nprint('rank', os.environ['RANK'], module12.NUMBER)\n"
VERBS = {"run": ["--no-torch", "--run-dir", "{run}", "say.py"], "check": []}


def make_project(folder: Path) -> Path:
    """Create a project of 300 modules, so that sending it takes some time."""
    folder.mkdir(parents=True)
    for number in range(300):
        (folder / f"module{number}.py").write_text(f"NUMBER = {number}\n" * 20)
    (folder / "say.py").write_text(SCRIPT)
    return folder


def measure_starts(lab, home: Path, folder: Path, verb: str, times: int) -> str:
    """Start a verb repeatedly. Returns a row of the table.

    Args:
        lab: Lab whose hosts share a home.
        home: Path of the home on this machine.
        folder: Folder of the project; the run directories are in its parent.
        verb: ``run`` or ``check``.
        times: Number of starts.
    """
    num_succeeded, num_unreachable, seconds = 0, 0, []
    for number in range(times):
        cache = home / ".cache" / "paceline"
        if number % 2 == 0:
            shutil.rmtree(cache, ignore_errors=True)
        arguments = [
            argument.format(run=folder.parent / f"run{number}") for argument in VERBS[verb]
        ]
        argv = [sys.executable, "-m", "paceline", verb, "-H", str(lab.hostfile),
                "--ssh-config", str(lab.ssh_config), *arguments]  # fmt: skip
        for _ in range(3):
            start = time.monotonic()
            completed = subprocess.run(
                argv, cwd=folder, capture_output=True, text=True, check=False
            )
            seconds.append(time.monotonic() - start)
            # On a busy machine sshd may be too slow; then the start is repeated.
            if "sshd does not speak" not in completed.stderr:
                break
            num_unreachable += 1
            shutil.rmtree(folder.parent / f"run{number}", ignore_errors=True)
        ranks = sorted(map(int, re.findall(r"rank (\d+) 12$", completed.stdout, re.MULTILINE)))
        is_complete = verb != "run" or ranks == list(range(len(lab.names)))
        leftovers = list(find_leftovers(cache))
        num_succeeded += completed.returncode == 0 and is_complete and not leftovers
        print(f"{verb}: {num_succeeded} of {number + 1} succeeded, {seconds[-1]:.1f} s", flush=True)
        if completed.returncode or not is_complete or leftovers:
            print(
                f"{completed.returncode} {leftovers}\n{completed.stdout}{completed.stderr}",
                flush=True,
            )
        shutil.rmtree(folder.parent / f"run{number}", ignore_errors=True)
    median = sorted(seconds)[len(seconds) // 2]
    cells = f"`{verb}` | {num_succeeded} of {times} | {num_unreachable} | {median:.1f}"
    return f"{len(lab.names)} | {cells}"


def find_leftovers(cache: Path) -> Iterator[str]:
    """Files in the cache that should not exist when no run is active."""
    for path in cache.glob("*/*"):
        if path.parent.name in ("jobs", "runs", ".paceline-incoming") or "." in path.name:
            yield f"{path.parent.name}/{path.name}"


def local_rows(hosts: int, times: int, verbs: Sequence[str]) -> Iterator[str]:
    from paceline.lab import Lab, LabOptions

    with tempfile.TemporaryDirectory() as folder:
        project = make_project(Path(folder) / "project")
        options = LabOptions(hosts=hosts, name=f"home-{os.getpid()}", shared_home=True)
        with Lab(options) as lab:
            for verb in verbs:
                row = measure_starts(lab, lab.home("n1"), project, verb, times)
                yield f"| this machine's | {row} |"


def nfs_rows(hosts: int, times: int, verbs: Sequence[str]) -> Iterator[str]:
    sys.path.insert(0, str(LAB_TESTS))
    import uml

    if reason := uml.missing(["exportfs", "rpc.nfsd", "rpc.mountd"]):
        yield f"| NFS | {hosts} | not tried | {reason} | | |"
        return
    arguments = ("inside", str(hosts), str(times), *verbs)
    with tempfile.TemporaryDirectory() as folder:
        limit_s = 120 + 300.0 * times * len(verbs)
        output = uml.boot(
            Path(folder), *arguments, program=Path(__file__), memory="3G", timeout=limit_s
        )
    rows = re.findall(r"^ROW (.*?)\r?$", output["all"], re.MULTILINE)
    yield from (f"| NFS 4.2 | {row} |" for row in rows)
    print(output["all"][-20_000:])


def run_in_guest(hosts: int, times: int, verbs: Sequence[str]) -> None:
    """Run under user-mode Linux: an NFS server, and hosts that each mount the share."""
    sys.path.insert(0, str(LAB_TESTS / "shares"))
    import inside as guest

    from paceline.lab import Lab, LabOptions

    guest.prepare()
    Path("/mnt/share").chmod(0o755)  # sshd requires a home that others cannot write to
    guest.nfs()
    guest.load("veth", "bridge", "tun", "overlay", "iptable_filter")
    homes = [Path(f"/mnt/home{number}") for number in range(1, hosts + 1)]
    for home in homes:
        home.mkdir()
        guest.mount_nfs(home)
    os.environ.update(XDG_RUNTIME_DIR="/mnt/runtime", HOME="/mnt/launcher")
    for name in ("runtime", "launcher"):
        Path("/mnt", name).mkdir(mode=0o700)
    project = make_project(Path("/mnt/work/project"))
    os.chdir(project)
    with Lab(LabOptions(hosts=hosts, name="nfs")) as lab:
        shutil.copytree(lab.home("n1") / ".ssh", homes[0] / ".ssh")
        for name, home in zip(lab.names, homes, strict=True):
            lab.exec(name, ["mount", "--bind", str(home), lab.home_inside()], check=True)
        for verb in verbs:
            print("ROW", measure_starts(lab, Path("/mnt/share"), project, verb, times), flush=True)


def main() -> None:
    if sys.argv[1:2] == ["inside"]:
        run_in_guest(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--nfs-times", type=int, default=10)
    parser.add_argument("--verbs", default=",".join(VERBS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    verbs = options.verbs.split(",")
    machine = platform.processor() or platform.machine()
    lines = [f"# One home for all hosts, {datetime.date.today()}", "", machine, ""]
    lines += [
        "| home | hosts | verb | succeeded | repeated, sshd too slow | seconds (median) |",
        "|---|---|---|---|---|---|",
    ]
    if options.times:
        lines += local_rows(options.hosts, options.times, verbs)
    if options.nfs_times:
        lines += nfs_rows(options.hosts, options.nfs_times, verbs)
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
