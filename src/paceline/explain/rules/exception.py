"""A rank raised an exception."""

from __future__ import annotations

import re
from dataclasses import replace

from paceline.explain.evidence import Evidence
from paceline.explain.outcome import PROGRAMMING_ERRORS, is_consequence
from paceline.explain.rule import MAX_EVIDENCE_LINES, Match, match_unit, parse_error_fields
from paceline.explain.unit_parser import parse_units
from paceline.explain.units import PythonError, Unit
from paceline.spec.failure import PEER_LOST

# how often the exception itself is the answer, by who raised it
LIBRARY, SCRIPT, PROGRAMMING, PACELINE = 0.4, 0.65, 0.8, 0.9
_PACELINE_ERRORS = "paceline.spec.errors."
# the words of libraries and of the system: what raises them is seldom at fault
_FOREIGN_MESSAGE = re.compile(
    r"NCCL|nccl\w{1,40}Error|CUDA|cuda|HIP |cu(?:DNN|BLAS)|\[Errno \d|gloo|c10d|ucp_|oneCCL"
    r"|MPI|^ray\."
)
_IN_LIBRARY = (
    "The script called {package}, which raised it. The message says what failed; the"
    " reason may lie in the arguments, on the host, or in the script."
)


def match(evidence: Evidence) -> Match | None:
    first = evidence.first_failure
    if first is not None and first.kind == "exception" and first.traceback:
        units = parse_units(first.traceback.splitlines())
        own = next((unit for unit in units if unit.error and unit.error.type), None)
        if own is not None and not PEER_LOST.search(own.text):
            return _describe(own, first.where, (first.host,), first.rank)
        if PEER_LOST.search(first.headline):
            return None
        lines = tuple(first.traceback.splitlines()[-MAX_EVIDENCE_LINES:])
        return Match(
            f"{first.where} raised {first.headline}", (first.host,), first.rank, 0.8, lines
        )
    for unit in evidence.outcome.failures:
        if unit.kind == "traceback" and unit.error and unit.error.type and not is_consequence(unit):
            return _describe(unit, unit.label, unit.hosts, unit.rank)
    return None


def _describe(unit: Unit, where: str, hosts: tuple[str, ...], rank: int | None) -> Match:
    error = unit.errors[-1]
    if error.type.startswith(_PACELINE_ERRORS):
        return replace(_describe_paceline_error(unit, error, where), hosts=hosts, rank=rank)
    frame = error.script_frame
    place = f" ({frame.location})" if frame is not None else ""
    message = " ".join(error.message.split())[:200]
    message += _root_cause(unit.errors)
    reason = _reason(error)
    confidence = LIBRARY if reason else SCRIPT
    if not reason and error.type in PROGRAMMING_ERRORS:
        confidence = PROGRAMMING
    match = match_unit(unit, f"{where} raised {message}{place}", confidence)
    return replace(match, hosts=hosts, rank=rank, reason=reason)


def _describe_paceline_error(unit: Unit, error: PythonError, where: str) -> Match:
    """Matches an error that Paceline raised in a rank; its message has a remedy."""
    headline = error.message.removeprefix(f"{error.type}: ").split("\n", 1)[0]
    fields = parse_error_fields(error.message)
    found = "; ".join(fields.get("found", "").splitlines())
    cause = f"{where}: {headline}{found and f': {found}'}"
    reason = "Paceline raised it, for the reason in its message."
    confirm = "The last lines of that rank's log."
    return match_unit(unit, cause, PACELINE, remedy=fields.get("remedy", ""), confirm=confirm,
                      reason=reason)  # fmt: skip


def _root_cause(errors: tuple[PythonError, ...]) -> str:
    """Returns ``, after TYPE: MESSAGE`` of a chain's first exception; empty if the last says it."""
    first, last = errors[0], errors[-1]
    words = " ".join(first.message.removeprefix(f"{first.type}:").split())
    if first is last or not words or words[:60] in last.message:
        return ""
    return f", after {first.type}: {words[:200]}"


def _reason(error: PythonError) -> str:
    """A more exact text than the rule's, if a library raised the exception."""
    in_script = error.is_in_script or not error.frames
    if in_script and not _FOREIGN_MESSAGE.search(error.message):
        return ""
    innermost = error.frames[-1].file if error.frames else ""
    package = re.search(r"(?:site|dist)-packages/(\w+)", innermost)
    return _IN_LIBRARY.format(package=package[1] if package else "a library")
