"""The recorded descriptions of hosts, and what Paceline must read from them.

``fixtures/dialects/DIALECT/CASE.txt`` is a text, ``CASE.env`` a set of variables, one
``KEY=VALUE`` per line; ``CASE.json`` next to it has the expected result.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.hosts.dialect import Parsed, Reading
from paceline.spec.errors import HostsError
from paceline.spec.hosts import Host

FOLDER = Path(__file__).parents[1] / "fixtures" / "dialects"
LABEL = "hosts.txt"
HERE = "here"
CASES = sorted([*FOLDER.glob("*/*.txt"), *FOLDER.glob("*/*.env")])


def case_id(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def reading_of(path: Path) -> Reading:
    content = path.read_bytes().decode()
    if path.suffix == ".txt":
        return Reading(text=content, label=LABEL, hostname=HERE)
    pairs = (line.split("=", 1) for line in content.splitlines())
    return Reading(environ=dict(pairs), hostname=HERE)


def expected_of(path: Path) -> Any:
    return json.loads(path.with_suffix(path.suffix + ".json").read_text())


def outcome(parsed: Parsed) -> dict[str, Any]:
    """Returns what was read in the form of the expected JSON."""
    found: dict[str, Any] = {"hosts": [said(host) for host in parsed.hosts]}
    if parsed.notes:
        found["notes"] = list(parsed.notes)
    if parsed.reference:
        found["follow"] = [parsed.reference.path, parsed.reference.dialect]
    return found


def refusal(error: HostsError) -> dict[str, Any]:
    return {"error": error.message, "found": error.found, "remedy": error.remedy}


def said(host: Host) -> dict[str, Any]:
    """Returns the fields of a host that are not defaults."""
    silent = {"address": host.name, "local": False, "slots_yield": False, "env": {}}
    return {k: v for k, v in asdict(host).items() if v is not None and silent.get(k) != v}
