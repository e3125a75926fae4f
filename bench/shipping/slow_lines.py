"""What a narrow line does to a job: how long its start takes, how late a word is, how Ctrl-C ends.

Hosts of virtual clusters whose links are slow, or far away: one column for each kind. A word is a
renewal of the lease: how long it took, at worst, while the line was full.

    python bench/shipping/slow_lines.py [--lines 1mbit 4mbit …] [--only WORDS] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.hosts import read_hosts
from paceline.lab import Lab, LabOptions
from paceline.launch.nodes.fleet import Fleet, Node
from paceline.launch.nodes.provisioner import send_folder
from paceline.launch.nodes.survey import OF_RECIPES, package_tree
from paceline.remote.fanout import connect_hosts
from paceline.remote.openssh import SshOptions
from paceline.transfer.results import Fetcher
from paceline.transfer.tree import read_parts

LINES = {"1mbit": "0ms", "4mbit": "0ms", "20mbit": "0ms", "20mbit, 200 ms": "100ms"}
LEASE_S = 10.0
SECONDS = 30.0  # of the line's time that large things take
LONGEST_S = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", nargs="*", default=list(LINES))
    parser.add_argument("--only", nargs="*", default=[], help="words of the rows to measure")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    table: dict[str, dict[str, str]] = {}
    for line in options.lines:
        for name, value in measured(line, options.only):
            table.setdefault(name, {})[line] = value
            print(f"{line}: {name}: {value}", flush=True)
    lines = [
        f"# Slow lines, {datetime.date.today().isoformat()}",
        "",
        f"{platform.machine()}, {os.cpu_count()} CPUs for launcher, ssh, sshd and hosts together; "
        f"load average {load:.1f} when this began. Seconds.",
        "",
        f"| | {' | '.join(options.lines)} |",
        "|---" * (len(options.lines) + 1) + "|",
        *(
            f"| {name} | {' | '.join(row.get(line, '') for line in options.lines)} |"
            for name, row in table.items()
        ),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


def measured(line: str, only: list[str]) -> Iterator[tuple[str, str]]:
    rate = line.split(",")[0]
    latency = LINES.get(line, "0ms")
    bytes_a_second = int(rate.removesuffix("mbit")) * 125_000
    rows: dict[str, Callable[[Lab, Path, int], str]] = {
        "recipes' package to a fresh host": package,
        f"project of {SECONDS:.0f} s of the line": project,
        f"results of {SECONDS:.0f} s of the line": results,
        "small job on 2 fresh hosts": small_job,
        "Ctrl-C beside a rank that writes all the time": chatty,
        "Ctrl-C while the project is sent": interrupted,
    }
    for name, measure in rows.items():
        if only and not any(word in name for word in only):
            continue
        with tempfile.TemporaryDirectory(prefix="paceline-slow-", dir="/var/tmp") as work:
            options = LabOptions(hosts=2, rate=rate, latency=latency, share=(work,))
            with Lab(options) as lab:
                try:
                    yield name, measure(lab, Path(work), int(bytes_a_second * SECONDS))
                except Exception as error:
                    yield name, f"{type(error).__name__}: {str(error)[:60]}"


def package(lab: Lab, work: Path, size: int) -> str:
    async def send(node: Node) -> None:
        await send_folder(node, package_tree(OF_RECIPES), "paceline", "bench")

    return beside_renewals(lab, send)


def project(lab: Lab, work: Path, size: int) -> str:
    (work / "code").mkdir()
    (work / "code" / "weights.bin").write_bytes(os.urandom(size))

    async def send(node: Node) -> None:
        await send_folder(node, read_parts(work / "code", ()), "code", "bench")

    return beside_renewals(lab, send)


def results(lab: Lab, work: Path, size: int) -> str:
    (work / "there").mkdir()
    (work / "here").mkdir()
    (work / "there" / "weights.bin").write_bytes(os.urandom(size))

    async def fetch(node: Node) -> None:
        fetcher = Fetcher(work / "here")
        await fetcher.fetch(node.channel, str(work / "there"), None, work / "here")

    return beside_renewals(lab, fetch)


def beside_renewals(lab: Lab, transfer: Callable[[Node], Awaitable[None]]) -> str:
    """How long a transfer to one host took, and the latest answer to a renewal meanwhile."""
    return asyncio.run(_beside_renewals(lab, transfer))


async def _beside_renewals(lab: Lab, transfer: Callable[[Node], Awaitable[None]]) -> str:
    hosts = read_hosts(str(lab.hostfile), environ={}, cwd=Path.cwd()).hosts[:1]
    channels = await connect_hosts(hosts, [sys.executable], SshOptions(lab.ssh_config))
    fleet = Fleet(channels, LEASE_S, lambda node, event: None, lambda node, why: None)
    node, latest = fleet.first, 0.0

    async def ask() -> None:
        nonlocal latest
        while True:
            begun = time.monotonic()
            asked = asyncio.ensure_future(node.channel.request("lease", seconds=LEASE_S))
            while not asked.done():
                await asyncio.wait([asked], timeout=0.1)
                latest = max(latest, time.monotonic() - begun)
            await asked
            await asyncio.sleep(0.2)

    begun, asking = time.monotonic(), asyncio.create_task(ask())
    try:
        await asyncio.wait_for(transfer(node), LONGEST_S)
        took = f"{time.monotonic() - begun:.1f}"
    except ConnectionError:
        took = f"lost after {time.monotonic() - begun:.1f}"
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await fleet.close()
    return f"{took}, a word {latest:.2f}"


@contextlib.contextmanager
def run(lab: Lab, folder: Path, script: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """``paceline run`` of a script on both hosts, from a fresh folder."""
    folder.mkdir(exist_ok=True)
    (folder / "job.py").write_text(script)
    argv = [sys.executable, "-m", "paceline", "run", "--hosts", str(lab.hostfile), "--ssh-config",
            str(lab.ssh_config), "--no-torch", "--check", "none", *words, "job.py"]  # fmt: skip
    child = subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             text=True)  # fmt: skip
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()


def small_job(lab: Lab, work: Path, size: int) -> str:
    begun = time.monotonic()
    with run(lab, work / "small", "print('begun')") as child:
        out, _ = child.communicate(timeout=LONGEST_S)
    assert child.returncode == 0, out
    return f"{time.monotonic() - begun:.1f}"


CHATTY = """
import os
print("begun", flush=True)
while True:
    print(os.urandom(40).hex())
"""


def chatty(lab: Lab, work: Path, size: int) -> str:
    with run(lab, work / "chatty", CHATTY, "--grace", "1") as child:
        seen = 0
        assert child.stdout is not None
        while seen < 200:
            seen += "begun" not in child.stdout.readline()
        drain = subprocess.Popen(["cat"], stdin=child.stdout, stdout=subprocess.DEVNULL)
        time.sleep(8)
        return ended(child, drain)


def interrupted(lab: Lab, work: Path, size: int) -> str:
    folder = work / "large"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(os.urandom(size))
    with run(lab, folder, "print('begun')", "--ship", "always") as child:
        time.sleep(10)
        return ended(child)


def ended(child: subprocess.Popen[str], drain: Any = None) -> str:
    """Seconds from Ctrl-C to the end."""
    if child.poll() is not None:
        return f"ended before, status {child.returncode}"
    begun = time.monotonic()
    child.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=LONGEST_S / 3)
    took = time.monotonic() - begun
    if drain is not None:
        drain.kill()
        drain.wait()
    return f"{took:.1f}"


if __name__ == "__main__":
    main()
