"""Runs checks before a job starts: all of them, or those that need only the facts of the logins."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.agent.files import safe_paths
from paceline.checks import runner
from paceline.checks.check import Requirements, Survey
from paceline.checks.link import bits_per_s
from paceline.launch.planning import planner
from paceline.remote.openssh import SshOptions
from paceline.spec import rundir as names
from paceline.spec.errors import NodeError
from paceline.spec.finding import Finding
from paceline.spec.hosts import Cluster, Host, Inspect
from paceline.spec.job import Job

# warnings that matter to a run; `paceline check` shows the others
REPORTED_CHECKS = {"limits", "disk", "torch"}


def preflight(job: Job, cluster: Cluster,
              ssh: SshOptions) -> tuple[list[str], list[dict[str, Any]]]:  # fmt: skip
    """Runs all checks; returns their warnings and the rates of the links.

    Raises NodeError if a check fails.
    """
    hosts = planner.choose_hosts(job, cluster)
    survey = asyncio.run(runner.survey_hosts(hosts, ssh, requirements_of(job, hosts), "full"))
    findings = runner.evaluate(survey, "full")
    raise_failures(findings)
    warnings = [finding.message for finding in findings if finding.outcome == "warn"]
    return warnings, link_rates(survey)


def link_rates(survey: Survey) -> list[dict[str, Any]]:
    """Returns bits per second of each link, in the form of findings.json."""
    pairs = (survey.evidence.get("link") or {}).get("pairs", ())
    return [{"from": pair["source"], "to": pair["target"], "bits_per_s": round(bits_per_s(pair))}
            for pair in pairs if pair.get("bytes") and pair["seconds"] > 0]  # fmt: skip


def inspector(job: Job, run_dir: Path | None = None,
              links: Sequence[Mapping[str, Any]] = ()) -> Inspect:  # fmt: skip
    """Returns a function that evaluates the facts of the logins and writes findings.json.

    Args:
        run_dir: Run directory; ``None`` for a plan, which has none.
        links: Rates of the links, if they were measured.
    """

    def inspect(hosts: Sequence[Host], facts: Mapping[str, Any],
                noise: Mapping[str, str]) -> list[str]:  # fmt: skip
        requirements = requirements_of(job, hosts)
        survey = Survey(tuple(hosts), {}, facts, dict(requirements.pythons), noise, requirements)
        findings = runner.evaluate(survey, "facts")
        if run_dir is not None:
            _write(run_dir, findings, links)
        raise_failures(findings)
        return [f.message for f in findings if f.outcome == "warn" and f.check in REPORTED_CHECKS]

    return inspect


def requirements_of(job: Job, hosts: Sequence[Host]) -> Requirements:
    """Returns the job's requirements for the checks."""
    return Requirements(
        pythons={host.name: planner.python_of(job, host) for host in hosts},
        workdirs={host.name: host.workdir or job.workdir for host in hosts},
        needs_torch=job.needs_torch,
        interface=job.interface.value,
        master_port=job.master_port.value,
        settled=(*job.environment.variables(), *job.environment.unset),
        job_variables=tuple(job.environment.variables()),
    )


def raise_failures(findings: Sequence[Finding]) -> None:
    """Raises NodeError if a check failed."""
    failures = [finding for finding in findings if finding.outcome == "fail"]
    if failures:
        raise NodeError(
            f"the checks found what would fail: {failures[0].message}",
            found="\n".join(finding.message for finding in failures[1:]),
            remedy="\n".join(dict.fromkeys(finding.remedy for finding in failures)),
        )


def _write(run_dir: Path, findings: Sequence[Finding], links: Sequence[Mapping[str, Any]]) -> None:
    measured = {"links": links} if links else {}
    document = {"findings": [finding.to_json() for finding in findings], **measured}
    text = json.dumps(document, indent=2) + "\n"
    with contextlib.suppress(OSError):  # a full disk is told where the run itself meets it
        safe_paths.write_file(str(run_dir), names.FINDINGS, text.encode())
