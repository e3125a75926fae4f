"""Are the installed packages the same?

Looks at: names and versions of all distributions of the interpreter on every host.
Warns when: they differ; only the differences are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.checks.check import Check, ProbeSession, Survey, join_names, passed, warned
from paceline.spec.finding import Finding
from paceline.spec.helptext import counted

MAX_LISTED = 8


async def probe(session: ProbeSession) -> dict[str, Any]:
    """By host, version by name."""
    answers = await session.request_all("packages")
    return {name: answer["packages"] for name, answer in answers.items()}


def evaluate(survey: Survey) -> list[Finding]:
    packages = survey.evidence["packages"]
    different = differences(packages)
    if not different:
        count = len(next(iter(packages.values()), {}))
        return [
            passed("packages", survey.names, f"{counted(count, 'package')}, the same on all hosts")
        ]
    lines = [
        f"{package} ({', '.join(f'{name} {v or chr(8211)}' for name, v in versions.items())})"
        for package, versions in different.items()
    ]
    summary = "1 package differs" if len(lines) == 1 else f"{len(lines)} packages differ"
    suffix = f" and {len(lines) - MAX_LISTED} more" if len(lines) > MAX_LISTED else ""
    first = next(iter(packages))
    return [
        warned(
            "packages",
            survey.names,
            f"{summary}: {'; '.join(lines[:MAX_LISTED])}{suffix}",
            f"On {first}: python -m pip freeze > requirements.txt; then paceline setup env "
            f"--requirements requirements.txt for {join_names(list(packages)[1:])}",
        )
    ]


def differences(packages: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str | None]]:
    """By package, version by host, for those that are not the same everywhere."""
    names = sorted({package for versions in packages.values() for package in versions})
    table = {p: {name: versions.get(p) for name, versions in packages.items()} for p in names}
    return {p: versions for p, versions in table.items() if len(set(versions.values())) > 1}


check = Check(
    "packages", "Packages", "full", evaluate, probe, needs_several_hosts=True, needs_torch=True
)
