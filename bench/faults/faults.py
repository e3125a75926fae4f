"""Faults made for real in the lab, and what the first line of ``paceline check`` says of each.

``python bench/faults/faults.py [faults] [pairs] [cost]`` prints Markdown; all parts by default.
"""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.cluster.lab import Lab, LabOptions

SOURCE = Path(__file__).resolve().parents[2] / "src"
THREE: dict[str, Any] = {"hosts": 3, "interface_names": ("eth0", "ens3"), "private": ("/srv:64m",)}


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        name: For the table.
        culprit: Words that the conclusion must hold.
        faults: To be injected.
        options: Of the lab.
        words: Further words for the command line.
    """

    name: str
    culprit: tuple[str, ...]
    faults: tuple[tuple[str, ...], ...] = ()
    options: dict[str, Any] = field(default_factory=lambda: dict(THREE))
    words: tuple[str, ...] = ("--quick",)


SINGLE = [
    Case("firewall drops new TCP", ("n2 drops TCP",), (("drop", "n2", "all-ephemeral"),)),
    Case("firewall drops a range", ("n2 drops TCP", "of the ports"),
         (("drop", "n2", "33000-46000"),)),
    Case("firewall drops 29500", ("n3 drops TCP", "port 29500"), (("drop", "n3", "29500"),)),
    Case("firewall rejects", ("n3 refuses TCP",), (("reject", "n3", "all-ephemeral"),)),
    Case("no route (errno 113)", ("n1 has no route to n2", "113"), (("unreachable", "n1", "n2"),)),
    Case("one host deaf to another", ("n3 drops TCP from n1",), (("deaf", "n3", "n1"),)),
    Case("slow link", ("link of n2", "slow"), (("slow", "n2", "100mbit"),),
         words=("--no-trial",)),
    Case("lossy link", ("link of n3", "loses packets"), (("loss", "n3", "3"),),
         words=("--no-trial",)),
    Case("disk full", ("/srv on n2 is full",), (("fill-disk", "n2", "/srv"),),
         words=("--quick", "--data", "/srv")),
    Case("sshd killed", ("cannot log in to n2", "refused"), (("kill", "n2", "sshd.*listener"),)),
    Case("powered off", ("cannot log in to n3",), (("power-off", "n3"),)),
    Case("unplugged", ("cannot log in to n2",), (("unplug", "n2"),)),
    Case("frozen", ("cannot log in to n1", "sshd does not speak"), (("freeze", "n1"),)),
    Case("own name is 127.0.1.1", ("loopback", "n1 and n2", "127.0.1.1"),
         options={"hosts": 2, "debian_hosts": True}),
    Case("own name is a dead interface", ("host name n1", "dead0"),
         options={"hosts": 2, "dead_interface": True, "dead_name": True}),
    Case("interpreter missing", ("has no Python at /no/python",),
         words=("--quick", "--python", "/no/python")),
]  # fmt: skip
HEALTHY = {
    "1 host": {"hosts": 1},
    "2 hosts": {"hosts": 2},
    "3 hosts, two interface names": dict(THREE),
    "8 hosts": {"hosts": 8},
    "3 hosts, second interface and bridges": {
        "hosts": 3, "dead_interface": True, "bridge_address": True,
    },
    "2 hosts, IPv6 only": {"hosts": 2, "ipv6_only": True},
    "2 hosts, 100 Mbit/s": {"hosts": 2, "rate": "100mbit"},
}  # fmt: skip
PAIRABLE = [
    ("fault", ("drop", "{}", "all-ephemeral"), "{} drops TCP"),
    ("fault", ("reject", "{}", "all-ephemeral"), "{} refuses TCP"),
    ("fault", ("fill-disk", "{}", "/srv"), "/srv on {} is full"),
    ("fault", ("unplug", "{}"), "cannot log in to {}"),
    ("fault", ("kill", "{}", "sshd.*listener"), "cannot log in to {}"),
]


def check(lab: Lab, *words: str) -> tuple[dict[str, Any], float]:
    argv = [sys.executable, "-m", "paceline", "check", "-H", str(lab.hostfile), "--ssh-config"]
    argv += [str(lab.ssh_config), "--json", *words]
    began = time.monotonic()
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, cwd="/")
    seconds = time.monotonic() - began
    if not done.stdout:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout), seconds


def first(said: dict[str, Any]) -> dict[str, Any]:
    order = ("fail", "unknown", "warn", "pass")
    found: dict[str, Any] = min(said["findings"], key=lambda one: order.index(one["outcome"]))
    return found


def show_faults() -> bool:
    print("## Each fault alone\n\n| fault | first line | right | s |\n|---|---|---|---|")
    well = True
    for case in SINGLE:
        with Lab(LabOptions(**case.options)) as lab:
            for fault in case.faults:
                lab.fault(*fault)
            said, seconds = check(lab, *case.words)
        message = first(said)["message"]
        right = all(words in message for words in case.culprit)
        well &= right
        print(f"| {case.name} | {message[:150]} | {'yes' if right else 'NO'} | {seconds:.1f} |")
    print("\n## Healthy labs\n\n| lab | fails and warnings | s |\n|---|---|---|")
    for name, options in HEALTHY.items():
        with Lab(LabOptions(**options)) as lab:
            said, seconds = check(lab, "--no-trial")
        bad = [one["message"] for one in said["findings"] if one["outcome"] != "pass"]
        well &= not bad
        print(f"| {name} | {'; '.join(bad) or 'none'} | {seconds:.1f} |")
    return well


def show_pairs(count: int = 5, seed: int = 20261120) -> bool:
    print("\n## Random pairs\n\n| faults | first line | both found |\n|---|---|---|")
    well, chance = True, random.Random(seed)
    for _ in range(count):
        chosen = chance.sample(PAIRABLE, 2)
        hosts = chance.sample(["n1", "n2", "n3", "n4"], 2)
        pairs = list(zip(chosen, hosts, strict=True))
        faults = [tuple(word.format(host) for word in fault) for (_, fault, _), host in pairs]
        with Lab(LabOptions(hosts=4, private=("/srv:64m",))) as lab:
            for fault in faults:
                lab.fault(*fault)
            said, _ = check(lab, "--quick", "--data", "/srv")
        failed = [one["message"] for one in said["findings"] if one["outcome"] == "fail"]
        wanted = [words.format(host) for (_, _, words), host in pairs]
        both = all(any(words in message for message in failed) for words in wanted)
        right = both and any(words in first(said)["message"] for words in wanted)
        extra = [message for message in failed if not any(words in message for words in wanted)]
        well &= right and not extra
        named = " + ".join(" ".join(fault) for fault in faults)
        verdict = "yes" if right and not extra else "NO"
        print(f"| {named} | {first(said)['message'][:120]} | {verdict} |")
    return well


def show_cost() -> None:
    print("\n## Cost\n\nMedian of 3, whole command; `hostname` over the same hosts for comparison.")
    print("\n| hosts | run hostname, s | --quick, s | full without the trial job, s |")
    print("|---|---|---|---|")
    for hosts in (2, 4, 8, 16, 32):
        with Lab(LabOptions(hosts=hosts)) as lab:
            login = sorted(hostname(lab) for _ in range(3))[1]
            quick = sorted(check(lab, "--quick")[1] for _ in range(3))[1]
            full = sorted(check(lab, "--no-trial")[1] for _ in range(3))[1]
        print(f"| {hosts} | {login:.2f} | {quick:.2f} | {full:.2f} |")


def hostname(lab: Lab) -> float:
    argv = [sys.executable, "-m", "paceline", "run", "-H", str(lab.hostfile), "--ssh-config"]
    argv += [str(lab.ssh_config), "--no-python", "--check", "none", "--run-dir"]
    argv += [f"/tmp/faults-{os.getpid()}-{time.monotonic_ns()}", "hostname"]
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    began = time.monotonic()
    subprocess.run(argv, capture_output=True, env=env, cwd="/", check=True)
    return time.monotonic() - began


def main(parts: list[str]) -> int:
    print(f"# paceline check against faults\n\n{platform.platform()}, {os.cpu_count()} CPUs, "
          f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}\n")  # fmt: skip
    well = True
    if not parts or "faults" in parts:
        well &= show_faults()
    if not parts or "pairs" in parts:
        well &= show_pairs()
    if not parts or "cost" in parts:
        show_cost()
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
