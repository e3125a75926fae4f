"""Faults made for real in the lab, and what the first line of ``paceline check`` says of each.

``python bench/faults/faults.py [faults] [healthy] [pairs] [WORD…]`` prints Markdown; all parts by
default. Further words choose the faults whose names hold one of them. After each fault its remedy
is applied as it was printed, and the check is made again.
"""

from __future__ import annotations

import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cases import HEALTHY, PAIRABLE, SINGLE, Case, shell

from paceline.lab import Lab, LabOptions

SOURCE = Path(__file__).resolve().parents[2] / "src"
ORDER = ("fail", "unknown", "warn", "pass")
# On HOST: COMMAND   or   Here: COMMAND
LINE = re.compile(r"^(?:On (?P<host>n\d+)|(?P<here>Here)): (?P<command>.+)$", re.MULTILINE)
PARTS = ("faults", "healthy", "pairs")


def check(lab: Lab, *words: str, cwd: str = "/") -> tuple[dict[str, Any], float]:
    """The object of ``paceline check --json``, and the seconds that the command took."""
    argv = [sys.executable, "-m", "paceline", "check", "-H", str(lab.hostfile), "--ssh-config"]
    argv += [str(lab.ssh_config), "--json", *words]
    began = time.monotonic()
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, cwd=cwd)
    seconds = time.monotonic() - began
    if not done.stdout:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout), seconds


def first(said: dict[str, Any]) -> dict[str, Any]:
    """The finding that the first line is made of."""
    found: dict[str, Any] = min(said["findings"], key=lambda one: ORDER.index(one["outcome"]))
    return found


def apply(lab: Lab, case: Case, remedy: str) -> str:
    """Does what the remedy says; tells whether it was typed as printed or done by hand."""
    if case.hand is not None:
        case.hand(lab)
        return f"by hand: {case.hand.__doc__}"
    lines = list(LINE.finditer(remedy))
    for line in lines:
        command = line["command"].replace("sudo ", "")
        if line["here"]:
            own = command.replace("scp ", f"scp -F {lab.ssh_config} ")
            subprocess.run(["sh", "-c", own], check=True, capture_output=True)
        else:
            shell(lab, line["host"], command)
    return "typed as printed" if lines else "the command line or paceline.toml changed"


def try_case(case: Case) -> tuple[str, bool, float, str, bool]:
    """Message, whether it names the culprit, seconds, how it was mended, whether that helped."""
    with Lab(LabOptions(**case.options)) as lab, tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "paceline.toml"
        late = "--iface" in case.words  # the settings are the remedy
        if case.settings and not late:
            settings.write_text(case.settings)
        with case.strike(lab):
            said, seconds = check(lab, *case.words, cwd=folder)
            found = first(said)
            right = all(words in found["message"] for words in case.culprit)
            right &= bool(found["remedy"])
            bad = [one for one in said["findings"] if one["outcome"] != "pass"]
            remedies = [one["remedy"] for one in bad if one["check"] == found["check"]]
            how = apply(lab, case, "\n".join(remedies))
            if late:
                settings.write_text(case.settings)
            elif case.again is not None and case.settings:
                settings.unlink()
            words = [w for w in case.again or case.words if not (late and w in ("--iface", "eth0"))]
            if "ssh-keygen -R" in found["remedy"]:
                command = re.search(r"ssh-keygen -R .*", found["remedy"])
                assert command is not None
                subprocess.run(["sh", "-c", command[0]], check=True, capture_output=True)
                how = "typed as printed"
            after, _ = check(lab, *words, cwd=folder)
    return found["message"], right, seconds, how, first(after)["outcome"] == "pass"


def show_faults(wanted: list[str]) -> bool:
    print("## Each fault alone\n")
    print("| pain | fault | first line | right | s | remedy | next check passes |")
    print("|---|---|---|---|---|---|---|")
    well = True
    for case in SINGLE:
        if wanted and not any(word in case.name for word in wanted):
            continue
        message, right, seconds, how, mended = try_case(case)
        well &= right and mended
        verdict = ["yes" if yes else "NO" for yes in (right, mended)]
        print(f"| {case.pains} | {case.name} | {message[:150]} | {verdict[0]} | {seconds:.1f} | "
              f"{how} | {verdict[1]} |", flush=True)  # fmt: skip
    return well


def show_healthy() -> bool:
    print("\n## Healthy labs\n\n| lab | fails and warnings | s |\n|---|---|---|")
    well = True
    for name, options in HEALTHY.items():
        with Lab(LabOptions(**options)) as lab:
            said, seconds = check(lab, "--no-trial")
        bad = [one["message"] for one in said["findings"] if one["outcome"] != "pass"]
        well &= not bad
        print(f"| {name} | {'; '.join(bad) or 'none'} | {seconds:.1f} |", flush=True)
    return well


def show_pairs(count: int = 5, seed: int = 20261120) -> bool:
    print("\n## Random pairs\n\n| faults | first line | both found |\n|---|---|---|")
    well, chance = True, random.Random(seed)
    for _ in range(count):
        chosen = chance.sample(PAIRABLE, 2)
        hosts = chance.sample(["n1", "n2", "n3", "n4"], 2)
        pairs = list(zip(chosen, hosts, strict=True))
        faults = [tuple(word.format(host) for word in fault) for (fault, _), host in pairs]
        with Lab(LabOptions(hosts=4, private=("/srv:64m",))) as lab:
            for fault in faults:
                lab.fault(*fault)
            said, _ = check(lab, "--quick", "--data", "/srv")
        failed = [one["message"] for one in said["findings"] if one["outcome"] == "fail"]
        wanted = [words.format(host) for (_, words), host in pairs]
        both = all(any(words in message for message in failed) for words in wanted)
        right = both and any(words in first(said)["message"] for words in wanted)
        extra = [message for message in failed if not any(words in message for words in wanted)]
        well &= right and not extra
        named = " + ".join(" ".join(fault) for fault in faults)
        verdict = "yes" if right and not extra else "NO"
        print(f"| {named} | {first(said)['message'][:120]} | {verdict} |", flush=True)
    return well


def main(words: list[str]) -> int:
    print(f"# paceline check against faults\n\n{platform.platform()}, {os.cpu_count()} CPUs, "
          f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}, "
          f"load {os.getloadavg()[0]:.1f}\n")  # fmt: skip
    wanted = [word for word in words if word not in PARTS]
    parts = [word for word in words if word in PARTS] or (["faults"] if wanted else list(PARTS))
    well = True
    if "faults" in parts:
        well &= show_faults(wanted)
    if "healthy" in parts:
        well &= show_healthy()
    if "pairs" in parts:
        well &= show_pairs()
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
