"""Do the loaded libraries agree, and do collectives work between the hosts?

Looks at: what torch says once it is loaded on every host (its version, what it was built for,
NCCL, backends), and a short job: every collective once, checked, and a megabyte all-reduced.
Fails when: loaded versions differ, a host cannot import torch, the job fails or a value is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.checks.check import Check, Scene, failed, listed, passed, unknown
from paceline.spec.finding import Finding

# what has to be the same everywhere, of what a loaded torch says of itself
SAME = ("torch", "cuda", "nccl")


def judge(scene: Scene) -> list[Finding]:
    found = scene.evidence.get("trial")
    if found is None:
        return []
    return [*_loaded(scene, found["loaded"]), *_job(scene, found)]


def _loaded(scene: Scene, loaded: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    for name in SAME:
        values = {host: str(said.get(name) or "none") for host, said in loaded.items()}
        if len(set(values.values())) > 1:
            told = ", ".join(f"{host} {value}" for host, value in values.items())
            return [
                failed(
                    "trial",
                    tuple(values),
                    f"the loaded {name} differs between the hosts: {told}",
                    "Install the same torch everywhere (paceline setup env --requirements FILE), "
                    "and take foreign library folders out of LD_LIBRARY_PATH",
                )
            ]
    if not loaded:
        return []
    one = next(iter(loaded.values()))
    told = ", ".join(f"{name} {one[name]}" for name in SAME if one.get(name))
    return [passed("trial", tuple(loaded), f"loaded everywhere: {told}")]


def _job(scene: Scene, found: Mapping[str, Any]) -> list[Finding]:
    if found.get("error"):
        hosts = tuple(found.get("hosts") or scene.names)
        remedy = found.get("remedy") or "paceline explain of that run says more"
        return [failed("trial", hosts, f"a short job fails: {found['error']}", remedy)]
    rows: Sequence[Mapping[str, Any]] = found["rows"]
    wrong = sorted({row["collective"] for row in rows if row["wrong"] > 0})
    if wrong:
        return [
            failed(
                "trial",
                scene.names,
                f"wrong values from {listed(wrong)} over {found['backend']}",
                "Memory or network corrupt data: paceline bench collectives with two hosts at a "
                "time finds the one; look at its ECC counters and cables",
            )
        ]
    if not rows:
        return [unknown("trial", scene.names, "the short job left no result")]
    best = max(row["busbw"] for row in rows if row["collective"] == "all_reduce")
    return [
        passed(
            "trial",
            scene.names,
            f"{len({row['collective'] for row in rows})} collectives right over "
            f"{found['backend']}, all_reduce {best * 8:.2f} Gbit/s on the bus",
        )
    ]


check = Check("trial", "Collectives", "full", judge, several=True, torch=True)
