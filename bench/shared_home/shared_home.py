"""Starts on hosts that share one home directory and do not see the project: how many succeed.

On this machine's own disk, and with the home on NFS: every host mounts it itself, from the kernel's
server, under user-mode Linux. That part needs the packages user-mode-linux and nfs-kernel-server
and a C compiler. Every second start finds an empty cache.

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


def project_in(folder: Path) -> Path:
    """A project that takes a moment to be sent."""
    folder.mkdir(parents=True)
    for number in range(300):
        (folder / f"module{number}.py").write_text(f"NUMBER = {number}\n" * 20)
    (folder / "say.py").write_text(SCRIPT)
    return folder


def starts(lab, home: Path, folder: Path, verb: str, times: int) -> str:
    """A row of the table: what became of so many starts of a verb.

    Args:
        lab: Whose hosts share a home.
        home: It, as seen from here.
        folder: Of the project, and of the run directories beside it.
        verb: ``run`` or ``check``.
        times: How many.
    """
    good, unreached, seconds = 0, 0, []
    for number in range(times):
        cache = home / ".cache" / "paceline"
        if number % 2 == 0:
            shutil.rmtree(cache, ignore_errors=True)
        words = [word.format(run=folder.parent / f"run{number}") for word in VERBS[verb]]
        argv = [sys.executable, "-m", "paceline", verb, "-H", str(lab.hostfile),
                "--ssh-config", str(lab.ssh_config), *words]  # fmt: skip
        for _ in range(3):
            begun = time.monotonic()
            done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
            seconds.append(time.monotonic() - begun)
            if "sshd does not speak" not in done.stderr:  # on a busy machine it may take too long
                break
            unreached += 1
            shutil.rmtree(folder.parent / f"run{number}", ignore_errors=True)
        ranks = sorted(map(int, re.findall(r"rank (\d+) 12$", done.stdout, re.MULTILINE)))
        right = verb != "run" or ranks == list(range(len(lab.names)))
        left = list(left_in(cache))
        good += done.returncode == 0 and right and not left
        print(f"{verb}: {good} of {number + 1} good, {seconds[-1]:.1f} s", flush=True)
        if done.returncode or not right or left:
            print(f"{done.returncode} {left}\n{done.stdout}{done.stderr}", flush=True)
        shutil.rmtree(folder.parent / f"run{number}", ignore_errors=True)
    median = sorted(seconds)[len(seconds) // 2]
    return f"{len(lab.names)} | `{verb}` | {good} of {times} | {unreached} | {median:.1f}"


def left_in(cache: Path) -> Iterator[str]:
    """What should be gone when no run is under way."""
    for path in cache.glob("*/*"):
        if path.parent.name in ("jobs", "runs", ".paceline-incoming") or "." in path.name:
            yield f"{path.parent.name}/{path.name}"


def on_this_machine(hosts: int, times: int, verbs: Sequence[str]) -> Iterator[str]:
    from paceline.lab import Lab, LabOptions

    with tempfile.TemporaryDirectory() as folder:
        project = project_in(Path(folder) / "project")
        options = LabOptions(hosts=hosts, name=f"home-{os.getpid()}", shared_home=True)
        with Lab(options) as lab:
            for verb in verbs:
                yield f"| this machine's | {starts(lab, lab.home('n1'), project, verb, times)} |"


def on_nfs(hosts: int, times: int, verbs: Sequence[str]) -> Iterator[str]:
    sys.path.insert(0, str(LAB_TESTS))
    import uml

    if reason := uml.missing(["exportfs", "rpc.nfsd", "rpc.mountd"]):
        yield f"| NFS | {hosts} | not tried | {reason} | | |"
        return
    words = ("inside", str(hosts), str(times), *verbs)
    with tempfile.TemporaryDirectory() as folder:
        limit_s = 120 + 300.0 * times * len(verbs)
        said = uml.boot(Path(folder), *words, program=Path(__file__), memory="3G", timeout=limit_s)
    rows = re.findall(r"^ROW (.*?)\r?$", said["all"], re.MULTILINE)
    yield from (f"| NFS 4.2 | {row} |" for row in rows)
    print(said["all"][-20_000:])


def inside(hosts: int, times: int, verbs: Sequence[str]) -> None:
    """Under the small kernel: a server, and hosts each of which has mounted its share itself."""
    sys.path.insert(0, str(LAB_TESTS / "shares"))
    import inside as small

    from paceline.lab import Lab, LabOptions

    small.prepare()
    Path("/mnt/share").chmod(0o755)  # sshd wants a home that nobody else can write to
    small.nfs()
    small.load("veth", "bridge", "tun", "overlay", "iptable_filter")
    homes = [Path(f"/mnt/home{number}") for number in range(1, hosts + 1)]
    for home in homes:
        home.mkdir()
        small.mount_nfs(home)
    os.environ.update(XDG_RUNTIME_DIR="/mnt/runtime", HOME="/mnt/launcher")
    for name in ("runtime", "launcher"):
        Path("/mnt", name).mkdir(mode=0o700)
    project = project_in(Path("/mnt/work/project"))
    os.chdir(project)
    with Lab(LabOptions(hosts=hosts, name="nfs")) as lab:
        shutil.copytree(lab.home("n1") / ".ssh", homes[0] / ".ssh")
        for name, home in zip(lab.names, homes, strict=True):
            lab.exec(name, ["mount", "--bind", str(home), lab.home_inside()], check=True)
        for verb in verbs:
            print("ROW", starts(lab, Path("/mnt/share"), project, verb, times), flush=True)


def main() -> None:
    if sys.argv[1:2] == ["inside"]:
        inside(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
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
        "| home | hosts | verb | succeeded | typed again as sshd was too slow | seconds (median) |",
        "|---|---|---|---|---|---|",
    ]
    if options.times:
        lines += on_this_machine(options.hosts, options.times, verbs)
    if options.nfs_times:
        lines += on_nfs(options.hosts, options.nfs_times, verbs)
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
