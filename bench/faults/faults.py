"""Injects faults in the lab and checks whether ``paceline check`` names each in its first line.

``python bench/faults/faults.py [faults] [healthy] [pairs] [WORD…]`` prints Markdown; all parts by
default. Further words select the faults whose names contain one of them. After each fault the
printed remedy is applied, and the check is repeated.
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
REMEDY_COMMAND = re.compile(
    r"^(?:On (?P<host>n\d+)|(?P<here>Here)): (?P<command>.+)$", re.MULTILINE
)
PARTS = ("faults", "healthy", "pairs")


def check(lab: Lab, *arguments: str, cwd: str = "/") -> tuple[dict[str, Any], float]:
    """Output of ``paceline check --json``, and the seconds of the command."""
    argv = [sys.executable, "-m", "paceline", "check", "-H", str(lab.hostfile), "--ssh-config"]
    argv += [str(lab.ssh_config), "--json", *arguments]
    start = time.monotonic()
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    completed = subprocess.run(argv, capture_output=True, text=True, env=env, cwd=cwd)
    seconds = time.monotonic() - start
    if not completed.stdout:
        raise SystemExit(completed.stderr)
    return json.loads(completed.stdout), seconds


def first_finding(report: dict[str, Any]) -> dict[str, Any]:
    """The finding that the first line reports."""
    finding: dict[str, Any] = min(
        report["findings"], key=lambda candidate: ORDER.index(candidate["outcome"])
    )
    return finding


def apply(lab: Lab, case: Case, remedy: str) -> str:
    """Apply a remedy. Returns whether it was typed as printed or applied by hand."""
    if case.manual_remedy is not None:
        case.manual_remedy(lab)
        return f"by hand: {case.manual_remedy.__doc__}"
    lines = list(REMEDY_COMMAND.finditer(remedy))
    for line in lines:
        command = line["command"].replace("sudo ", "")
        if line["here"]:
            local_command = command.replace("scp ", f"scp -F {lab.ssh_config} ")
            subprocess.run(["sh", "-c", local_command], check=True, capture_output=True)
        else:
            shell(lab, line["host"], command)
    return "typed as printed" if lines else "the command line or paceline.toml changed"


def try_case(case: Case) -> tuple[str, bool, float, str, bool]:
    """Message, whether it names the cause, seconds, the remedy, and whether that helped."""
    with Lab(LabOptions(**case.options)) as lab, tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "paceline.toml"
        settings_are_remedy = "--iface" in case.arguments  # the settings are the remedy
        if case.settings and not settings_are_remedy:
            settings.write_text(case.settings)
        with case.inject(lab):
            report, seconds = check(lab, *case.arguments, cwd=folder)
            finding = first_finding(report)
            is_correct = all(text in finding["message"] for text in case.expected_texts)
            is_correct &= bool(finding["remedy"])
            not_passed = [other for other in report["findings"] if other["outcome"] != "pass"]
            remedies = [
                other["remedy"] for other in not_passed if other["check"] == finding["check"]
            ]
            remedy_applied = apply(lab, case, "\n".join(remedies))
            if settings_are_remedy:
                settings.write_text(case.settings)
            elif case.arguments_after is not None and case.settings:
                settings.unlink()
            arguments = [
                word
                for word in case.arguments_after or case.arguments
                if not (settings_are_remedy and word in ("--iface", "eth0"))
            ]
            if "ssh-keygen -R" in finding["remedy"]:
                command = re.search(r"ssh-keygen -R .*", finding["remedy"])
                assert command is not None
                subprocess.run(["sh", "-c", command[0]], check=True, capture_output=True)
                remedy_applied = "typed as printed"
            report_after, _ = check(lab, *arguments, cwd=folder)
    return (
        finding["message"],
        is_correct,
        seconds,
        remedy_applied,
        first_finding(report_after)["outcome"] == "pass",
    )


def show_faults(filters: list[str]) -> bool:
    print("## Each fault alone\n")
    print("| problem | fault | first line | correct | s | remedy | next check passes |")
    print("|---|---|---|---|---|---|---|")
    passed = True
    for case in SINGLE:
        if filters and not any(text in case.name for text in filters):
            continue
        message, is_correct, seconds, remedy_applied, is_fixed = try_case(case)
        passed &= is_correct and is_fixed
        verdict = ["yes" if is_true else "NO" for is_true in (is_correct, is_fixed)]
        print(f"| {case.problem} | {case.name} | {message[:150]} | {verdict[0]} | {seconds:.1f} | "
              f"{remedy_applied} | {verdict[1]} |", flush=True)  # fmt: skip
    return passed


def show_healthy() -> bool:
    print("\n## Healthy labs\n\n| lab | fails and warnings | s |\n|---|---|---|")
    passed = True
    for name, options in HEALTHY.items():
        with Lab(LabOptions(**options)) as lab:
            report, seconds = check(lab, "--no-trial")
        not_passed = [
            finding["message"] for finding in report["findings"] if finding["outcome"] != "pass"
        ]
        passed &= not not_passed
        print(f"| {name} | {'; '.join(not_passed) or 'none'} | {seconds:.1f} |", flush=True)
    return passed


def show_pairs(count: int = 5, seed: int = 20261120) -> bool:
    print("\n## Random pairs\n\n| faults | first line | both found |\n|---|---|---|")
    passed, rng = True, random.Random(seed)
    for _ in range(count):
        selected = rng.sample(PAIRABLE, 2)
        hosts = rng.sample(["n1", "n2", "n3", "n4"], 2)
        pairs = list(zip(selected, hosts, strict=True))
        faults = [tuple(word.format(host) for word in fault) for (fault, _), host in pairs]
        with Lab(LabOptions(hosts=4, private=("/srv:64m",))) as lab:
            for fault in faults:
                lab.fault(*fault)
            report, _ = check(lab, "--quick", "--data", "/srv")
        failed = [
            finding["message"] for finding in report["findings"] if finding["outcome"] == "fail"
        ]
        expected = [text.format(host) for (_, text), host in pairs]
        all_found = all(any(text in message for message in failed) for text in expected)
        is_correct = all_found and any(
            text in first_finding(report)["message"] for text in expected
        )
        unexpected = [
            message for message in failed if not any(text in message for text in expected)
        ]
        passed &= is_correct and not unexpected
        description = " + ".join(" ".join(fault) for fault in faults)
        verdict = "yes" if is_correct and not unexpected else "NO"
        print(
            f"| {description} | {first_finding(report)['message'][:120]} | {verdict} |", flush=True
        )
    return passed


def main(arguments: list[str]) -> int:
    print(f"# paceline check with injected faults\n\n{platform.platform()}, {os.cpu_count()} CPUs, "
          f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}, "
          f"load {os.getloadavg()[0]:.1f}\n")  # fmt: skip
    filters = [argument for argument in arguments if argument not in PARTS]
    parts = [argument for argument in arguments if argument in PARTS] or (
        ["faults"] if filters else list(PARTS)
    )
    passed = True
    if "faults" in parts:
        passed &= show_faults(filters)
    if "healthy" in parts:
        passed &= show_healthy()
    if "pairs" in parts:
        passed &= show_pairs()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
