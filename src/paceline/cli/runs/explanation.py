"""The explanation of a failed run: found, written into its findings, and shown at its end."""

from __future__ import annotations

import contextlib
import json
import secrets
from pathlib import Path

from paceline.explain.conclusion import Conclusion, conclude, to_findings
from paceline.explain.evidence import Evidence
from paceline.explain.evidence_reader import from_result
from paceline.explain.rules import load_all
from paceline.report import explanation
from paceline.rundir.records import read_object
from paceline.spec import rundir as names
from paceline.spec.events import Event
from paceline.spec.failure import Result

SHOWN_IN_LOG_TAIL = ("exception", "said-why")  # their words stand in the last lines of a failed run


def succeeded(evidence: Evidence) -> bool:
    """Returns whether nothing went wrong."""
    return evidence.result.exit_code == 0


def save_findings(run: Path, conclusion: Conclusion) -> None:
    """Writes the conclusion into the run's findings.json, behind what the checks found."""
    file = run / names.FINDINGS
    content = read_object(file) or {}
    previous = content.get("findings")
    retained = [
        one
        for one in (previous if isinstance(previous, list) else [])
        if isinstance(one, dict) and not str(one.get("check", "")).startswith("explain/")
    ]
    findings = [*retained, *(finding.to_json() for finding in to_findings(conclusion))]
    temporary = file.with_name(f".{file.name}-{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):  # a run on a full or foreign disk can still be explained
        with temporary.open("x", encoding="utf-8") as out:
            json.dump({**content, "findings": findings}, out, indent=2)
            out.write("\n")
        temporary.replace(file)
    with contextlib.suppress(OSError):
        temporary.unlink()


def explain_failure(run: Path, result: Result, events: tuple[Event, ...]) -> str:
    """Explains a failed run: writes the conclusion beside it and returns it as text.

    The text is empty where it would only repeat the traceback that is shown anyway.

    Args:
        run: The run directory.
        result, events: How it ended and what happened, as its launcher knows it.
    """
    conclusion = conclude(from_result(run, result, events), load_all())
    save_findings(run, conclusion)
    if not conclusion.matches or conclusion.matches[0][0].code in SHOWN_IN_LOG_TAIL:
        return ""
    return "\n".join(
        f"paceline: {line}" if at == 0 else f"  {line}"
        for at, line in enumerate(explanation.summary_lines(conclusion))
    )
