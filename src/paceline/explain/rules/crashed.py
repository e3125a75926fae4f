"""A rank crashed in compiled code."""

from __future__ import annotations

import re
import signal

from paceline.explain.evidence import Evidence
from paceline.explain.rule import Match, match_exit, match_unit
from paceline.explain.units import Unit

_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 11: "SIGSEGV"}
_CRASH = re.compile(
    r"Signal (?:4|6|7|8|11) \((?P<name>SIG\w+)\)|(?P<words>Segmentation fault|Illegal instruction)"
    r"|Fatal Python error: (?P<fatal>.+)"
)
# NCCL's watchdog then ends the process itself
_ABORTED = re.compile(
    r"Watchdog caught collective operation timeout|watchdog got stuck"
    r"|Terminating the process after attempting to dump debug info"
)
# torch 2.13 crashes in DistributedDataParallel's constructor with this debug level
_DETAIL_LEVEL = re.compile(r"The debug level is set to DETAIL|in _ddp_init_helper$")
_LESS_DETAIL = (
    "Leave out `TORCH_DISTRIBUTED_DEBUG=DETAIL`, or set `TORCH_DISTRIBUTED_DEBUG=INFO`: with "
    "DETAIL, torch 2.13 crashes in the constructor of DistributedDataParallel."
)
_SHARED_MEMORY = {
    "reason": (
        "The process used memory that has nothing behind it: /dev/shm is full (containers get 64"
        " MiB unless told otherwise), or a file that is mapped into memory was cut or lies on a"
        " full or broken disk."
    ),
    "remedy": (
        "Look at `df -h /dev/shm` while it runs. Start the container with more"
        " (`docker run --shm-size=8g IMAGE`), on a host `sudo mount -o remount,size=8g /dev/shm`;"
        " or use fewer loader workers. Otherwise look whether data and weights are whole."
    ),
}


def match(evidence: Evidence) -> Match | None:
    logs = (*evidence.logs, *evidence.debug)
    detail = any(_DETAIL_LEVEL.search(line) for log in logs for line in log.lines)
    remedy = _LESS_DETAIL if detail else ""
    aborted = any(_ABORTED.search(line) for log in logs for line in log.lines)
    signals = _SIGNALS.keys() - {signal.SIGABRT} if aborted else _SIGNALS.keys()
    for end in evidence.exits:
        if end["signal"] in signals:
            cause = f"{end.where} crashed in compiled code ({_SIGNALS[end['signal']]})"
            return match_exit(end, cause, 0.8, remedy=remedy)
    for unit in evidence.outcome.failures:
        number = next((exit.signal for exit in unit.exits if exit.signal in signals), None)
        if number is not None and unit.kind == "exit":
            cause = f"{unit.label} crashed in compiled code ({_SIGNALS[number]})"
            stack = _stack(evidence, unit)
            frame = stack.error.script_frame if stack and stack.error else None
            place = f" in {frame.function} ({frame.location})" if frame else ""
            texts = _SHARED_MEMORY if number == signal.SIGBUS else {"remedy": remedy}
            return match_unit(stack or unit, cause + place, 0.7, **texts)
    for unit, crash in evidence.search(_CRASH):
        text = crash["name"] or crash["words"] or crash["fatal"]
        if aborted and text.strip() in ("SIGABRT", "Aborted"):
            continue
        cause = f"{unit.label} crashed in compiled code ({text.strip()})"
        return match_unit(unit, cause, 0.7, remedy=remedy)
    return None


def _stack(evidence: Evidence, end: Unit) -> Unit | None:
    """The stack that the process printed as it crashed."""
    return next(
        (unit for unit in evidence.outcome.failures
         if unit.kind == "crash" and unit.frames and unit.rank in (None, end.rank)),
        None,
    )  # fmt: skip
