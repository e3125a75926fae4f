"""Are the installed packages the same?

Looks at: names and versions of all distributions of the interpreter on every host.
Warns when: they differ; only the differences are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.checks.check import Check, Probing, Scene, listed, passed, warned
from paceline.spec.finding import Finding
from paceline.spec.helptext import counted

SHOWN = 8


async def probe(probing: Probing) -> dict[str, Any]:
    """By host, version by name."""
    answers = await probing.each("packages")
    return {name: answer["packages"] for name, answer in answers.items()}


def judge(scene: Scene) -> list[Finding]:
    found = scene.evidence["packages"]
    different = differences(found)
    if not different:
        count = len(next(iter(found.values()), {}))
        return [
            passed("packages", scene.names, f"{counted(count, 'package')}, the same on all hosts")
        ]
    lines = [
        f"{package} ({', '.join(f'{name} {v or chr(8211)}' for name, v in versions.items())})"
        for package, versions in different.items()
    ]
    many = "1 package differs" if len(lines) == 1 else f"{len(lines)} packages differ"
    more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    first = next(iter(found))
    return [
        warned(
            "packages",
            scene.names,
            f"{many}: {'; '.join(lines[:SHOWN])}{more}",
            f"On {first}: python -m pip freeze > requirements.txt; then paceline setup env "
            f"--requirements requirements.txt for {listed(list(found)[1:])}",
        )
    ]


def differences(found: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str | None]]:
    """By package, version by host, for those that are not the same everywhere."""
    every = sorted({package for versions in found.values() for package in versions})
    table = {p: {name: versions.get(p) for name, versions in found.items()} for p in every}
    return {p: versions for p, versions in table.items() if len(set(versions.values())) > 1}


check = Check("packages", "Packages", "full", judge, probe, several=True, torch=True)
