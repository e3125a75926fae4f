"""What is checked before a job starts: with everything, or with what the logins brought."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.checks import examine
from paceline.checks.check import Scene, Wishes
from paceline.checks.link import bits
from paceline.launch import decide
from paceline.launch.prepare import Inspect
from paceline.remote.openssh import SshOptions
from paceline.spec import rundir as names
from paceline.spec.errors import NodeError
from paceline.spec.finding import Finding
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Job

# of the warnings, these matter to a job of ours; the others are for `paceline check`
TOLD = {"limits", "disk", "torch"}


def preflight(job: Job, cluster: Cluster,
              ssh: SshOptions) -> tuple[list[str], list[dict[str, Any]]]:  # fmt: skip
    """All of ``paceline check``: its warnings, and what each link carried.

    NodeError when something fails.
    """
    hosts = decide.choose_hosts(job, cluster)
    scene = asyncio.run(examine.examine(hosts, ssh, wishes_of(job, hosts), "full"))
    found = examine.judge(scene, "full")
    refuse(found)
    return [finding.message for finding in found if finding.outcome == "warn"], links_of(scene)


def links_of(scene: Scene) -> list[dict[str, Any]]:
    """Bits a second of each way between two hosts, as findings.json holds them."""
    pairs = (scene.evidence.get("link") or {}).get("pairs", ())
    return [{"from": pair["source"], "to": pair["target"], "bits_per_s": round(bits(pair))}
            for pair in pairs if pair.get("bytes") and pair["seconds"] > 0]  # fmt: skip


def inspector(job: Job, run_dir: Path | None = None,
              links: Sequence[Mapping[str, Any]] = ()) -> Inspect:  # fmt: skip
    """The quick part: judges what the login brought, writes findings.json, asks nobody.

    Args:
        job: What is to run.
        run_dir: Of the run; ``None`` for a plan, which has none.
        links: What each link carried, where that was measured.
    """

    def inspect(hosts: Sequence[Host], facts: Mapping[str, Any],
                noise: Mapping[str, str]) -> list[str]:  # fmt: skip
        wishes = wishes_of(job, hosts)
        scene = Scene(tuple(hosts), {}, facts, dict(wishes.pythons), noise, wishes)
        found = examine.judge(scene, "facts")
        if run_dir is not None:
            _write(run_dir, found, links)
        refuse(found)
        return [f.message for f in found if f.outcome == "warn" and f.check in TOLD]

    return inspect


def wishes_of(job: Job, hosts: Sequence[Host]) -> Wishes:
    """What the checks need to know of the job."""
    return Wishes(
        pythons={host.name: decide.python_of(job, host) for host in hosts},
        workdirs={host.name: host.workdir or job.workdir for host in hosts},
        needs_torch=job.needs_torch,
        interface=job.interface.value,
        master_port=job.master_port.value,
        settled=(*job.environment.all(), *job.environment.unset),
    )


def refuse(found: Sequence[Finding]) -> None:
    """NodeError for what would fail."""
    failed = [finding for finding in found if finding.outcome == "fail"]
    if failed:
        raise NodeError(
            f"the checks found what would fail: {failed[0].message}",
            found="\n".join(finding.message for finding in failed[1:]),
            remedy="\n".join(dict.fromkeys(finding.remedy for finding in failed)),
        )


def _write(run_dir: Path, found: Sequence[Finding], links: Sequence[Mapping[str, Any]]) -> None:
    measured = {"links": links} if links else {}
    both = {"findings": [finding.to_json() for finding in found], **measured}
    text = json.dumps(both, indent=2)
    with contextlib.suppress(OSError):  # a full disk is told where the run itself meets it
        (run_dir / names.FINDINGS).write_text(text + "\n", encoding="utf-8")
