"""The explanation of a run that went wrong: found, written into its findings, shown at its end."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from paceline.explain.conclusion import Conclusion, conclude, to_findings
from paceline.explain.evidence import Evidence
from paceline.explain.evidence_reader import from_result
from paceline.explain.rules import load_all
from paceline.report import explanation
from paceline.rundir.directory import write_text
from paceline.rundir.records import objects_in, read_object
from paceline.spec import rundir as names
from paceline.spec.events import Event
from paceline.spec.failure import Result

# their words are in the last lines of a failed run
SHOWN_IN_LOG_TAIL = ("exception", "reported-by-program")


def succeeded(evidence: Evidence) -> bool:
    """Whether a run ended with status 0, and its ranks are not known to have trained apart."""
    return evidence.result.exit_code == 0 and not evidence.replica_difference


def save_findings(run: Path, conclusion: Conclusion) -> None:
    """Writes the conclusion into the run's findings.json, behind what the checks found."""
    content = read_object(run / names.FINDINGS) or {}
    retained = [finding for finding in objects_in(content.get("findings"))
                if not str(finding.get("check", "")).startswith("explain/")]  # fmt: skip
    findings = [*retained, *(finding.to_json() for finding in to_findings(conclusion))]
    text = json.dumps({**content, "findings": findings}, indent=2)
    with contextlib.suppress(OSError):  # a run on a full or foreign disk can still be explained
        write_text(run, names.FINDINGS, f"{text}\n")


def explain_failure(run: Path, result: Result, events: tuple[Event, ...]) -> str:
    """Explains a run that went wrong: writes the conclusion beside it and returns it as text.

    The text is empty if it would only repeat the traceback that is shown anyway.
    """
    conclusion = conclude(from_result(run, result, events), load_all())
    save_findings(run, conclusion)
    if not conclusion.matches or conclusion.matches[0][0].code in SHOWN_IN_LOG_TAIL:
        return ""
    return "\n".join(
        f"paceline: {line}" if at == 0 else f"  {line}"
        for at, line in enumerate(explanation.summary_lines(conclusion))
    )
