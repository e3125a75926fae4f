"""Are the GPUs well and idle, and the same everywhere?

Looks at: nvidia-smi, where there is one.
Fails when: nvidia-smi does, or a GPU has uncorrected memory errors. Warns when GPUs are in use,
are throttled by the hardware, or differ in kind or number between hosts.
"""

from __future__ import annotations

from typing import Any

from paceline.checks.check import Check, ProbeSession, Survey, failed, passed, unknown, warned
from paceline.spec.finding import Finding

BUSY_MIB = 500


async def probe(session: ProbeSession) -> dict[str, Any]:
    """By host, what nvidia-smi said."""
    return await session.request_all("gpus")


def parse(text: str) -> list[dict[str, str]]:
    """The lines of ``nvidia-smi --query-gpu``, by name of the field."""
    names = ("index", "name", "driver", "total", "used", "load", "temperature", "ecc", "throttled")
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines() if line)
    return [dict(zip(names, row, strict=False)) for row in rows]


def evaluate(survey: Survey) -> list[Finding]:
    findings: list[Finding] = []
    kinds: dict[str, str] = {}
    for name, report in survey.evidence["gpu"].items():
        if report.get("missing"):
            findings += _missing_tool_findings(survey, name)
            kinds[name] = "none"
        elif "broken" in report:
            findings.append(
                failed(
                    "gpu",
                    [name],
                    f"nvidia-smi on {name} fails: {report['broken']}",
                    f"On {name}: sudo dmesg | grep -i nvrm; reboot, or reinstall the "
                    "driver that matches the kernel module",
                )
            )
        else:
            cards = parse(report["gpus"])
            kinds[name] = f"{len(cards)} × {', '.join(sorted({c['name'] for c in cards}))}"
            findings += [f for card in cards for f in _gpu_findings(name, card)]
            findings += _busy_findings(name, cards, report["apps"])
    if len(set(kinds.values())) > 1:
        summary = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
        findings.append(
            warned(
                "gpu",
                tuple(kinds),
                f"the GPUs differ: {summary}",
                "Every step waits for the slowest; give slots per host, or leave the odd one out",
            )
        )
    if not findings:
        findings = [
            passed(
                "gpu",
                survey.names,
                "no GPUs"
                if set(kinds.values()) == {"none"}
                else f"healthy and idle: {next(iter(kinds.values()))}",
            )
        ]
    return findings


def _missing_tool_findings(survey: Survey, name: str) -> list[Finding]:
    gpus = (survey.facts[name].get("devices") or {}).get("gpus") or []
    if not any(gpu["maker"] == "nvidia" for gpu in gpus):
        return []
    return [
        unknown(
            "gpu",
            [name],
            f"{name} has NVIDIA devices but no nvidia-smi: their health is not known",
            "Install the driver's tools",
        )
    ]


def _gpu_findings(name: str, card: dict[str, str]) -> list[Finding]:
    label = f"GPU {card['index']} of {name}"
    if card.get("ecc", "0").isdigit() and int(card["ecc"]) > 0:
        return [
            failed(
                "gpu",
                [name],
                f"{label} has {card['ecc']} uncorrected memory errors",
                f"On {name}: sudo nvidia-smi -r -i {card['index']} while it is idle; if they "
                "come back, leave it out: --env CUDA_VISIBLE_DEVICES=…",
            )
        ]
    if card.get("throttled", "").lower() == "active":
        return [
            warned(
                "gpu",
                [name],
                f"{label} is slowed down by the hardware ({card['temperature']} °C)",
                f"Look at cooling and power of {name}: nvidia-smi -q -d PERFORMANCE",
            )
        ]
    return []


def _busy_findings(name: str, cards: list[dict[str, str]], apps: str) -> list[Finding]:
    busy = [card for card in cards if card["used"].isdigit() and int(card["used"]) > BUSY_MIB]
    if not busy:
        return []
    pids = [line.split(",")[1].strip() for line in apps.splitlines() if line.count(",") >= 2]
    usage = ", ".join(f"{card['index']}: {card['used']} MiB" for card in busy)
    processes = f" by process {', '.join(pids)}" if pids else ""
    return [
        warned(
            "gpu",
            [name],
            f"GPUs of {name} are in use{processes} ({usage})",
            f"On {name}: ps -fp {','.join(pids) or 'PID'}; wait for them, or choose others: "
            "--env CUDA_VISIBLE_DEVICES=…",
        )
    ]


check = Check("gpu", "GPUs", "full", evaluate, probe)
