"""Jobs over slow links: duration of start and transfers, delay of lease renewals, time of Ctrl-C.

The hosts are those of virtual clusters with a low rate or a high latency; the table has a column
for each link. "renewal" is the longest time of a lease renewal during the transfer.

    python bench/shipping/slow_lines.py [--lines 1mbit 4mbit …] [--only TEXT …] [--out FILE]
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

LINK_LATENCIES = {"1mbit": "0ms", "4mbit": "0ms", "20mbit": "0ms", "20mbit, 200 ms": "100ms"}
LEASE_S = 10.0
TRANSFER_S = 30.0  # duration of large transfers at the rate of the link
MAX_S = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", nargs="*", default=list(LINK_LATENCIES))
    parser.add_argument(
        "--only", nargs="*", default=[], help="parts of the names of rows to measure"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    table: dict[str, dict[str, str]] = {}
    for line in options.lines:
        for name, value in measure_rows(line, options.only):
            table.setdefault(name, {})[line] = value
            print(f"{line}: {name}: {value}", flush=True)
    lines = [
        f"# Slow links, {datetime.date.today().isoformat()}",
        "",
        f"{platform.machine()}, {os.cpu_count()} CPUs for launcher, ssh, sshd and hosts together; "
        f"load average {load:.1f} at the start. Values in seconds.",
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


def measure_rows(line: str, filters: list[str]) -> Iterator[tuple[str, str]]:
    rate = line.split(",")[0]
    latency = LINK_LATENCIES.get(line, "0ms")
    bytes_per_s = int(rate.removesuffix("mbit")) * 125_000
    rows: dict[str, Callable[[Lab, Path, int], str]] = {
        "recipes' package to a new host": package_row,
        f"project of {TRANSFER_S:.0f} s of the link's rate": project_row,
        f"results of {TRANSFER_S:.0f} s of the link's rate": results_row,
        "small job on 2 new hosts": small_job,
        "Ctrl-C with a rank that prints continuously": interrupt_noisy_job,
        "Ctrl-C while the project is sent": interrupt_transfer,
    }
    for name, measure in rows.items():
        if filters and not any(text in name for text in filters):
            continue
        with tempfile.TemporaryDirectory(prefix="paceline-slow-", dir="/var/tmp") as work:
            options = LabOptions(hosts=2, rate=rate, latency=latency, share=(work,))
            with Lab(options) as lab:
                try:
                    yield name, measure(lab, Path(work), int(bytes_per_s * TRANSFER_S))
                except Exception as error:
                    yield name, f"{type(error).__name__}: {str(error)[:60]}"


def package_row(lab: Lab, work: Path, size: int) -> str:
    async def send(node: Node) -> None:
        await send_folder(node, package_tree(OF_RECIPES), "paceline", "bench")

    return transfer_with_renewals(lab, send)


def project_row(lab: Lab, work: Path, size: int) -> str:
    (work / "code").mkdir()
    (work / "code" / "weights.bin").write_bytes(os.urandom(size))

    async def send(node: Node) -> None:
        await send_folder(node, read_parts(work / "code", ()), "code", "bench")

    return transfer_with_renewals(lab, send)


def results_row(lab: Lab, work: Path, size: int) -> str:
    (work / "there").mkdir()
    (work / "here").mkdir()
    (work / "there" / "weights.bin").write_bytes(os.urandom(size))

    async def fetch(node: Node) -> None:
        fetcher = Fetcher(work / "here")
        await fetcher.fetch(node.channel, str(work / "there"), None, work / "here")

    return transfer_with_renewals(lab, fetch)


def transfer_with_renewals(lab: Lab, transfer: Callable[[Node], Awaitable[None]]) -> str:
    """Duration of a transfer to one host, and of the slowest lease renewal during it."""
    return asyncio.run(_transfer_with_renewals(lab, transfer))


async def _transfer_with_renewals(lab: Lab, transfer: Callable[[Node], Awaitable[None]]) -> str:
    hosts = read_hosts(str(lab.hostfile), environ={}, cwd=Path.cwd()).hosts[:1]
    channels = await connect_hosts(hosts, [sys.executable], SshOptions(lab.ssh_config))
    fleet = Fleet(channels, LEASE_S, lambda node, event: None, lambda node, reason: None)
    node, slowest = fleet.first, 0.0

    async def renew() -> None:
        nonlocal slowest
        while True:
            start = time.monotonic()
            renewal = asyncio.ensure_future(node.channel.request("lease", seconds=LEASE_S))
            while not renewal.done():
                await asyncio.wait([renewal], timeout=0.1)
                slowest = max(slowest, time.monotonic() - start)
            await renewal
            await asyncio.sleep(0.2)

    start, renewals = time.monotonic(), asyncio.create_task(renew())
    try:
        await asyncio.wait_for(transfer(node), MAX_S)
        duration = f"{time.monotonic() - start:.1f}"
    except ConnectionError:
        duration = f"lost after {time.monotonic() - start:.1f}"
    finally:
        renewals.cancel()
        await asyncio.gather(renewals, return_exceptions=True)
        await fleet.close()
    return f"{duration}, renewal {slowest:.2f}"


@contextlib.contextmanager
def run(lab: Lab, folder: Path, script: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """``paceline run`` of a script on both hosts, from a new folder."""
    folder.mkdir(exist_ok=True)
    (folder / "job.py").write_text(script)
    argv = [sys.executable, "-m", "paceline", "run", "--hosts", str(lab.hostfile), "--ssh-config",
            str(lab.ssh_config), "--no-torch", "--check", "none", *options, "job.py"]  # fmt: skip
    process = subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             text=True)  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def small_job(lab: Lab, work: Path, size: int) -> str:
    start = time.monotonic()
    with run(lab, work / "small", "print('begun')") as process:
        output, _ = process.communicate(timeout=MAX_S)
    assert process.returncode == 0, output
    return f"{time.monotonic() - start:.1f}"


NOISY_SCRIPT = """
import os
print("begun", flush=True)
while True:
    print(os.urandom(40).hex())
"""


def interrupt_noisy_job(lab: Lab, work: Path, size: int) -> str:
    with run(lab, work / "chatty", NOISY_SCRIPT, "--grace", "1") as process:
        num_lines = 0
        assert process.stdout is not None
        while num_lines < 200:
            num_lines += "begun" not in process.stdout.readline()
        drain = subprocess.Popen(["cat"], stdin=process.stdout, stdout=subprocess.DEVNULL)
        time.sleep(8)
        return interrupt(process, drain)


def interrupt_transfer(lab: Lab, work: Path, size: int) -> str:
    folder = work / "large"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(os.urandom(size))
    with run(lab, folder, "print('begun')", "--ship", "always") as process:
        time.sleep(10)
        return interrupt(process)


def interrupt(process: subprocess.Popen[str], drain: Any = None) -> str:
    """Seconds from Ctrl-C to the end."""
    if process.poll() is not None:
        return f"ended earlier, status {process.returncode}"
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=MAX_S / 3)
    duration = time.monotonic() - start
    if drain is not None:
        drain.kill()
        drain.wait()
    return f"{duration:.1f}"


if __name__ == "__main__":
    main()
