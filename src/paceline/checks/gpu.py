"""Are the GPUs healthy and idle, and the same everywhere?

Looks at: nvidia-smi, if a host has it.
Fails when: nvidia-smi fails, or a GPU has uncorrected memory errors. Warns when GPUs are in use,
are throttled by the hardware, or differ in kind or number between hosts.
"""

from __future__ import annotations

from typing import Any

from paceline.checks.check import Check, ProbeSession, Survey, failed, passed, unknown, warned
from paceline.spec.finding import Finding

BUSY_MIB = 500


async def probe(session: ProbeSession) -> dict[str, Any]:
    """Returns the output of nvidia-smi, by host."""
    return await session.request_all("gpus")


def parse(text: str) -> list[dict[str, str]]:
    """Parses ``nvidia-smi --query-gpu`` into one mapping for each GPU, by name of the field.

    Commands that users are told to type contain the index.
    """
    names = ("index", "name", "driver", "total", "used", "load", "temperature", "ecc", "throttled")
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines() if line)
    cards = (dict(zip(names, row, strict=False)) for row in rows)
    return [card for card in cards if card["index"].isdecimal() and "used" in card]


def evaluate(survey: Survey) -> list[Finding]:
    findings: list[Finding] = []
    kinds: dict[str, str] = {}
    for name, report in survey.evidence["gpu"].items():
        if report.get("missing"):
            findings += _missing_tool_findings(survey, name)
            kinds[name] = "none"
        elif "broken" in report:
            message = f"nvidia-smi on {name} fails: {report['broken']}"
            remedy = (
                f"On {name}: sudo dmesg | grep -i nvrm; reboot, or reinstall the "
                "driver that matches the kernel module"
            )
            findings.append(failed("gpu", [name], message, remedy))
        else:
            cards = parse(report["gpus"])
            kinds[name] = f"{len(cards)} × {', '.join(sorted({c['name'] for c in cards}))}"
            findings += [f for card in cards for f in _gpu_findings(name, card)]
            findings += _busy_findings(name, cards, report["apps"])
    if len(set(kinds.values())) > 1:
        summary = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
        remedy = "Every step waits for the slowest; give slots per host, or leave the odd one out"
        findings.append(warned("gpu", tuple(kinds), f"the GPUs differ: {summary}", remedy))
    if findings:
        return findings
    kind = next(iter(kinds.values()))
    message = "no GPUs" if kind == "none" else f"healthy and idle: {kind}"
    return [passed("gpu", survey.names, message)]


def _missing_tool_findings(survey: Survey, name: str) -> list[Finding]:
    gpus = (survey.facts[name].get("devices") or {}).get("gpus") or []
    if not any(gpu["maker"] == "nvidia" for gpu in gpus):
        return []
    message = f"{name} has NVIDIA devices but no nvidia-smi: their health is not known"
    return [unknown("gpu", [name], message, "Install the driver's tools")]


def _gpu_findings(name: str, card: dict[str, str]) -> list[Finding]:
    label = f"GPU {card['index']} of {name}"
    if card.get("ecc", "0").isdigit() and int(card["ecc"]) > 0:
        remedy = (
            f"On {name}: sudo nvidia-smi -r -i {card['index']} while it is idle; if they "
            "come back, leave it out: --env CUDA_VISIBLE_DEVICES=…"
        )
        message = f"{label} has {card['ecc']} uncorrected memory errors"
        return [failed("gpu", [name], message, remedy)]
    if card.get("throttled", "").lower() == "active":
        message = f"{label} is slowed down by the hardware ({card['temperature']} °C)"
        remedy = f"Look at cooling and power of {name}: nvidia-smi -q -d PERFORMANCE"
        return [warned("gpu", [name], message, remedy)]
    return []


def _busy_findings(name: str, cards: list[dict[str, str]], apps: str) -> list[Finding]:
    busy = [card for card in cards if card["used"].isdigit() and int(card["used"]) > BUSY_MIB]
    if not busy:
        return []
    pids = [line.split(",")[1].strip() for line in apps.splitlines() if line.count(",") >= 2]
    pids = [pid for pid in pids if pid.isdecimal()]
    usage = ", ".join(f"{card['index']}: {card['used']} MiB" for card in busy)
    processes = f" by process {', '.join(pids)}" if pids else ""
    remedy = (
        f"On {name}: ps -fp {','.join(pids) or 'PID'}; wait for them, or choose others: "
        "--env CUDA_VISIBLE_DEVICES=…"
    )
    return [warned("gpu", [name], f"GPUs of {name} are in use{processes} ({usage})", remedy)]


check = Check("gpu", "GPUs", evaluate, probe)
