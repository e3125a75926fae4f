"""Is the data the same on all hosts?

Looks at: paths given with --data: names, sizes, and the content of up to 64 small files.
Fails when: a host has different data, or none that this machine could send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
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
from paceline.spec.formatting import pluralize


async def probe(session: ProbeSession) -> dict[str, Any]:
    """Returns ``exists``, ``files``, ``bytes`` and ``digest``, by path and host.

    The host ``""`` is this machine, of which only ``exists`` is known.
    """
    paths = session.survey.requirements.data
    return {path: {"": {"exists": Path(path).exists()},
                   **await session.request_all("digest_tree", path=path)}
            for path in paths}  # fmt: skip


def evaluate(survey: Survey) -> list[Finding]:
    return [_finding(path, trees) for path, trees in survey.evidence["data"].items()]


def _finding(path: str, trees: dict[str, Any]) -> Finding:
    is_here = trees.get("", {}).get("exists", False)
    trees = {name: tree for name, tree in trees.items() if name}
    missing = [name for name, tree in trees.items() if not tree["exists"]]
    present = {name: tree for name, tree in trees.items() if tree["exists"]}
    if is_here and not present:
        message = f"{path} is on this machine, and is sent to {join_names(missing)} at the start"
        return passed("data", missing, message)
    if missing and not is_here:
        source = next(iter(present), "")
        remedy = _copy_commands(path, source, missing) if source else "Check the spelling"
        verb = "has" if len(missing) == 1 else "have"
        return failed("data", missing, f"{join_names(missing)} {verb} no {path}", remedy)
    common_digest, _ = Counter(tree["digest"] for tree in present.values()).most_common(1)[0]
    deviating = [name for name, tree in present.items() if tree["digest"] != common_digest]
    reference = next(name for name, tree in present.items() if tree["digest"] == common_digest)
    if deviating:
        sizes = ", ".join(f"{name}: {_size(present[name])}" for name in (reference, *deviating))
        message = f"{path} on {join_names(deviating)} is not what the others have ({sizes})"
        remedy = "\n".join(f"On {name}: mv {path} {path}.old" for name in deviating)
        remedy += f"\n{_copy_commands(path, reference, deviating)}"
        return failed("data", deviating, message, remedy)
    hosts = "all hosts" if not missing else f"{join_names([*present])}, and sent to the others"
    message = f"{path} is equal on {hosts}: {_size(present[reference])}"
    return passed("data", tuple(present), message)


def _copy_commands(path: str, source: str, targets: list[str]) -> str:
    """Copies through this machine, because hosts need not be able to log in to each other."""
    parent = path.rstrip("/").rpartition("/")[0] or "/"
    return "\n".join(f"Here: scp -3rp {source}:{path} {name}:{parent}" for name in targets)


def _size(tree: Mapping[str, Any]) -> str:
    return f"{pluralize(tree['files'], 'file')}, {format_bytes(tree['bytes'])}"


check = Check("data", "Data", evaluate, probe)
