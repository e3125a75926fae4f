"""Is the data the same on all hosts?

Looks at: paths given with --data: names, sizes, and the content of up to 64 small files.
Fails when: a host does not have it, or has something else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from paceline.checks.check import Check, Probing, Scene, failed, listed, passed, size
from paceline.spec.finding import Finding


async def probe(probing: Probing) -> dict[str, Any]:
    """By path and host: exists, files, bytes, digest."""
    return {
        path: await probing.each("digest_tree", path=path) for path in probing.scene.wishes.data
    }


def judge(scene: Scene) -> list[Finding]:
    return [f for path, found in scene.evidence["data"].items() for f in _path(path, found)]


def _path(path: str, found: dict[str, Any]) -> list[Finding]:
    missing = [name for name, tree in found.items() if not tree["exists"]]
    there = {name: tree for name, tree in found.items() if tree["exists"]}
    if missing:
        source = next(iter(there), "")
        how = _copies(path, source, missing) if source else "Check the spelling"
        return [failed("data", missing, f"{listed(missing)} {_has(missing)} no {path}", how)]
    usual, _ = Counter(tree["digest"] for tree in there.values()).most_common(1)[0]
    odd = [name for name, tree in there.items() if tree["digest"] != usual]
    good = next(name for name, tree in there.items() if tree["digest"] == usual)
    if odd:
        told = ", ".join(
            f"{n}: {_files(there[n])}, {size(there[n]['bytes'])}" for n in (good, *odd)
        )
        return [
            failed(
                "data",
                odd,
                f"{path} on {listed(odd)} is not what the others have ({told})",
                "\n".join(f"On {name}: mv {path} {path}.old" for name in odd)
                + f"\n{_copies(path, good, odd)}",
            )
        ]
    tree = there[good]
    return [
        passed(
            "data",
            tuple(there),
            f"{path} is equal on all hosts: {_files(tree)}, {size(tree['bytes'])}",
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


check = Check("data", "Data", "full", judge, probe)
