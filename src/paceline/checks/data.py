"""Is the data the same on all hosts?

Looks at: paths given with --data: names, sizes, and the content of up to 64 small files.
Fails when: a host does not have it, or has something else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from paceline.checks.check import (
    Check,
    ProbeSession,
    Survey,
    failed,
    format_bytes,
    join_names,
    passed,
)
from paceline.spec.finding import Finding


async def probe(session: ProbeSession) -> dict[str, Any]:
    """By path and host: exists, files, bytes, digest."""
    return {
        path: await session.request_all("digest_tree", path=path)
        for path in session.survey.requirements.data
    }


def evaluate(survey: Survey) -> list[Finding]:
    return [f for path, trees in survey.evidence["data"].items() for f in _path(path, trees)]


def _path(path: str, trees: dict[str, Any]) -> list[Finding]:
    missing = [name for name, tree in trees.items() if not tree["exists"]]
    present = {name: tree for name, tree in trees.items() if tree["exists"]}
    if missing:
        source = next(iter(present), "")
        remedy = _copies(path, source, missing) if source else "Check the spelling"
        return [failed("data", missing, f"{join_names(missing)} {_has(missing)} no {path}", remedy)]
    common_digest, _ = Counter(tree["digest"] for tree in present.values()).most_common(1)[0]
    deviating = [name for name, tree in present.items() if tree["digest"] != common_digest]
    reference = next(name for name, tree in present.items() if tree["digest"] == common_digest)
    if deviating:
        sizes = ", ".join(
            f"{n}: {_files(present[n])}, {format_bytes(present[n]['bytes'])}"
            for n in (reference, *deviating)
        )
        return [
            failed(
                "data",
                deviating,
                f"{path} on {join_names(deviating)} is not what the others have ({sizes})",
                "\n".join(f"On {name}: mv {path} {path}.old" for name in deviating)
                + f"\n{_copies(path, reference, deviating)}",
            )
        ]
    tree = present[reference]
    return [
        passed(
            "data",
            tuple(present),
            f"{path} is equal on all hosts: {_files(tree)}, {format_bytes(tree['bytes'])}",
        )
    ]


def _copies(path: str, source: str, targets: list[str]) -> str:
    """From host to host through this machine: they need not let each other in."""
    parent = path.rstrip("/").rpartition("/")[0] or "/"
    return "\n".join(f"Here: scp -3rp {source}:{path} {name}:{parent}" for name in targets)


def _has(names: list[str]) -> str:
    return "has" if len(names) == 1 else "have"


def _files(tree: Mapping[str, Any]) -> str:
    count = tree["files"]
    return f"{count} file{'s' * (count != 1)}"


check = Check("data", "Data", "full", evaluate, probe)
