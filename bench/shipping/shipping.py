"""Sending a folder to a host of a virtual cluster: Paceline against `rsync` over the same ssh.

Paceline hashes the folder, logs in, compares, sends what is missing, and builds the copy. `rsync
-a` logs in, compares sizes and times, and sends. Each is measured with nothing on the host, and
with an unchanged copy on the host. Paceline builds the job's copy from the host's cache each time,
so new data are written twice, and unchanged data once.

    python bench/shipping/shipping.py [--large-mib 2048] [--small 100000] [--folder D] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline.lab import Lab, LabOptions

BLOCK = os.urandom(1 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large-mib", type=int, default=2048, help="size of the one large file")
    parser.add_argument("--small", type=int, default=100_000, help="number of files of 1 KB")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ship", nargs=2, metavar=("FOLDER", "LAB"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ship:
        print(json.dumps(asyncio.run(ship(Path(options.ship[0]), options.ship[1]))))
        return
    load = os.getloadavg()[0]
    lines = [
        f"# Shipping a folder, {datetime.date.today().isoformat()}",
        "",
        f"{platform.machine()}, {os.cpu_count()} CPUs for the launcher, ssh, sshd and the host "
        f"together; load average {load:.1f} at the start. Memory is the peak resident set.",
        "",
        "| folder | on the host | rsync s | Paceline s | ratio | hashing s "
        "| launcher MiB | agent MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    work = Path(tempfile.mkdtemp(prefix="paceline-shipping-", dir=options.folder))
    try:
        if options.large_mib:
            make_large(work / "large", options.large_mib)
            lines += rows(f"1 file of {options.large_mib} MiB", work / "large", work)
            shutil.rmtree(work / "large")
        if options.small:
            make_small(work / "small", options.small)
            lines += rows(f"{options.small:,} files of 1 KB", work / "small", work)
    finally:
        shutil.rmtree(work)
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


def make_large(folder: Path, mib: int) -> None:
    folder.mkdir()
    with (folder / "weights.bin").open("wb") as file:
        for number in range(mib):
            file.write(number.to_bytes(8, "big") + BLOCK[8:])


def make_small(folder: Path, count: int) -> None:
    for number in range(count):
        path = folder / f"{number // 1000:04d}" / f"{number:07d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        offset = number % 1000
        path.write_bytes(number.to_bytes(8, "big") + BLOCK[offset : offset + 1016])


def rows(name: str, folder: Path, work: Path) -> list[str]:
    """Rows of the table: without data on the host, and with an unchanged copy."""
    remote = work / "there"
    for part in ("cache", "rsync"):
        (remote / part).mkdir(parents=True)
    lines = []
    with Lab(LabOptions(hosts=1, share=(str(remote),))) as lab:
        link = f"mkdir -p ~/.cache && ln -sfn {remote}/cache ~/.cache/paceline"
        assert lab.popen(lab.names[0], ["sh", "-c", link]).wait() == 0
        for state in ("nothing", "unchanged copy"):
            rsync_s = rsync_seconds(lab, folder, remote / "rsync")
            paceline_result = ship_with_paceline(folder, lab)
            lines.append(
                f"| {name} | {state} | {rsync_s:.1f} | {paceline_result['seconds']:.1f} "
                f"| {paceline_result['seconds'] / rsync_s:.2f} | {paceline_result['hashing']:.1f} "
                f"| {paceline_result['launcher']:.0f} | {paceline_result['agent']:.0f} |"
            )
            print(lines[-1], flush=True)
    shutil.rmtree(remote)
    return lines


def rsync_seconds(lab: Lab, folder: Path, target: Path) -> float:
    """Seconds of one call of rsync."""
    start = time.monotonic()
    shell = f"ssh -F {lab.ssh_config}"
    subprocess.run(["rsync", "-a", "-e", shell, f"{folder}/", f"{lab.names[0]}:{target}"],
                   check=True)  # fmt: skip
    os.sync()
    return time.monotonic() - start


def ship_with_paceline(folder: Path, lab: Lab) -> dict[str, float]:
    """Send the folder with Paceline in its own process: seconds, and MiB of memory."""
    argv = [sys.executable, __file__, "--ship", str(folder), str(lab.hostfile.parent)]
    start = time.monotonic()
    output = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout
    os.sync()
    return {**json.loads(output), "seconds": time.monotonic() - start}


async def ship(folder: Path, lab: str) -> dict[str, float]:
    """Send a folder as a launcher does. Returns seconds of hashing and peak memory."""
    from paceline.hosts import read_hosts
    from paceline.launch.nodes.fleet import Node
    from paceline.launch.nodes.provisioner import send_folder
    from paceline.remote.fanout import connect_hosts
    from paceline.remote.openssh import SshOptions
    from paceline.transfer.tree import read_parts

    start = time.monotonic()
    tree = read_parts(folder, ())
    hashing = time.monotonic() - start
    hostfile, config = sorted(Path(lab).glob("hostfile*"))[0], Path(lab) / "ssh_config"
    hosts = read_hosts(str(hostfile), environ={}, cwd=Path.cwd()).hosts
    (channel,) = await connect_hosts(hosts, [sys.executable], SshOptions(config))
    try:
        node = Node(channel.host, channel)
        await send_folder(node, tree, "input0", "bench")
        return {"hashing": hashing, "launcher": launcher_peak_mib(), "agent": agent_peak_mib()}
    finally:
        await channel.request("bye")
        await channel.close(60)


def launcher_peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def agent_peak_mib() -> float:
    """Peak memory of the largest agent on this machine, including its lab hosts."""
    return max(
        map(process_peak_mib, (p for p in Path("/proc").iterdir() if p.name.isdigit())), default=0.0
    )


def process_peak_mib(process: Path) -> float:
    try:
        command_line: Any = (process / "cmdline").read_bytes()
        if b"sys.stdin.buffer.raw.readline" not in command_line:
            return 0.0
        lines = (process / "status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), 0.0)


if __name__ == "__main__":
    main()
