"""Are the installed packages the same?

Looks at: names and versions of all distributions of the interpreter on every host.
Warns when: they differ; only the differences are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.checks.check import Check, ProbeSession, Survey, join_names, passed, warned
from paceline.spec.finding import Finding
from paceline.spec.formatting import pluralize

MAX_LISTED = 8


async def probe(session: ProbeSession) -> dict[str, Any]:
    """Returns the version of each package, by host and name."""
    answers = await session.request_all("packages")
    return {name: answer["packages"] for name, answer in answers.items()}


def evaluate(survey: Survey) -> list[Finding]:
    packages: Mapping[str, Mapping[str, str]] = survey.evidence["packages"]
    differing = differences(packages)
    if not differing:
        count = len(next(iter(packages.values()), {}))
        message = f"{pluralize(count, 'package')}, the same on all hosts"
        return [passed("packages", survey.names, message)]
    lines = []
    for package, versions in differing.items():
        listed = ", ".join(f"{host} {version or chr(8211)}" for host, version in versions.items())
        lines.append(f"{package} ({listed})")
    summary = "1 package differs" if len(lines) == 1 else f"{len(lines)} packages differ"
    more = f" and {len(lines) - MAX_LISTED} more" if len(lines) > MAX_LISTED else ""
    message = f"{summary}: {'; '.join(lines[:MAX_LISTED])}{more}"
    first, *others = packages
    others = [
        host
        for host in others
        if any(versions[host] != versions[first] for versions in differing.values())
    ]
    remedy = (
        f"On {first}: python -m pip freeze > requirements.txt; then paceline setup env "
        f"--requirements requirements.txt for {join_names(others)}"
    )
    return [warned("packages", survey.names, message, remedy)]


def differences(packages: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str | None]]:
    """Returns the versions by package and host, for packages that differ between hosts."""
    names = sorted({package for versions in packages.values() for package in versions})
    table = {p: {host: versions.get(p) for host, versions in packages.items()} for p in names}
    return {p: versions for p, versions in table.items() if len(set(versions.values())) > 1}


check = Check("packages", "Packages", evaluate, probe, needs_several_hosts=True, needs_torch=True)
