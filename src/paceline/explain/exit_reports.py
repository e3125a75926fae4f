"""Recognises launchers' reports of how processes ended. Pure.

Of torchrun, Slurm, Open MPI, Intel MPI and MPICH, DeepSpeed, accelerate, pdsh, Ray, Kubernetes and
shells.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from paceline.explain.units import Exit

_SIGNALS = {
    "Killed": 9, "Segmentation fault": 11, "Aborted": 6, "Bus error": 7, "Illegal instruction": 4,
    "Floating point exception": 8, "Terminated": 15, "Hangup": 1, "SIGKILL": 9, "SIGSEGV": 11,
    "SIGABRT": 6, "SIGBUS": 7, "SIGILL": 4, "SIGFPE": 8, "SIGTERM": 15, "SIGHUP": 1, "SIGINT": 2,
}  # fmt: skip
_NAMED_SIGNAL = "|".join(_SIGNALS)
_N = r"\d{1,9}"
# Each states one end; groups: host, rank, code, signal, name of a signal, memory
_FORMS = tuple(
    re.compile(pattern)
    for pattern in (
        r"paceline: failed first: rank (?P<rank>\d{1,9}) on (?P<host>[\w.-]{1,253}): "
        rf"(?:.{{0,2000}}\((?:exit status (?P<code>{_N})|(?P<name>{_NAMED_SIGNAL}))\)"
        rf"|killed by (?P<killed>{_NAMED_SIGNAL}))?",
        rf"failed \(exitcode: (?P<status>-?{_N})\) local_rank: (?P<local>{_N})",
        r"srun: error: (?P<host>[\w.-]{1,253}): tasks? (?P<rank>\d{1,9})[\d,-]{0,999}: "
        rf"(?:Exited with exit code (?P<code>{_N})|(?P<memory>Out Of Memory)"
        rf"|(?P<name>{_NAMED_SIGNAL}))",
        rf"sigkill_handler\] .{{0,2000}} exits with return code = (?P<status>-?{_N})",
        r"process rank (?P<rank>\d{1,9}) with PID \d{1,9} on node (?P<host>[\w.-]{1,253}) exited "
        rf"on signal (?P<signal>{_N})",
        r"pdsh@[\w.-]{1,253}: (?P<host>[\w.-]{1,253}): ssh exited with exit code "
        rf"(?P<code>{_N})",
        rf"died with <Signals\.SIG\w{{1,9}}: (?P<signal>{_N})>",
        r"process (?P<rank>\d{1,9}) terminated with (?:signal (?P<name>SIG\w{1,6})|exit code"
        rf" (?P<code>{_N}))",
        r"Received (?:Signals\.)?(?P<name>SIG\w{1,6}) death signal",
        rf"Received (?P<signal>{_N}) death signal",
        r"(?:^|\s)(?P<host>[\w.-]{1,253}) exited with code (?P<shell>\d{1,9})$",
        rf"returned non-zero exit status (?P<code>{_N})",
        r"\b[Ee]xit ?[Cc]ode:? (?P<shell>1[2-5]\d)\b",
        r"^ {0,4}Exit code: {2,8}(?P<code>\d{1,3})$",
        rf"line {_N}: {{1,6}}{_N} (?P<name>{_NAMED_SIGNAL})",
        rf"^(?P<name>{_NAMED_SIGNAL})(?: \(core dumped\))?(?:$| {{2,}})",
        r"(?P<memory>OOMKilled)",
        r"slurmstepd(?:-[\w.-]{1,253})?: error: (?P<memory>Detected \d{1,9} oom[-_]kill event)",
        rf"Process {_N} got signal: (?P<signal>{_N})",
        r"(?:killed by|exited on|received|terminated by|by) signal:? (?P<signal>\d{1,3})\b",
    )
)
_FAST = re.compile(
    r"exit|Exit code|srun|failed first|terminated with|died|signal|OOM|oom|Killed|Segmentation"
    r"|Aborted|Bus error|Illegal|Floating|Terminated|Hangup"
)
_TABLE_FIELD = re.compile(
    r"^ {0,8}(?P<key>time|host|rank|exitcode|error_file|traceback) {0,12}: ?(?P<value>.*)$"
)
_MPI_NAME = re.compile(rf"^ {{1,8}}Process name: \[\[{_N},{_N}\],(?P<rank>{_N})\]")
_NUMBER = re.compile(r"-?\d{1,9}")
_BAD_TERMINATION = re.compile(
    r"=   (?:(?:RANK (?P<rank>\d{1,9}) )?PID \d{1,9} RUNNING AT (?P<host>[\w.-]{1,253})"
    r"|KILLED BY SIGNAL: (?P<signal>\d{1,3})|EXIT(?:ING WITH|) CODE: (?P<code>\d{1,9}))"
    r"|EXIT STRING: .{1,40} \(signal (?P<string>\d{1,3})\)"
)


def parse_box(lines: Sequence[str]) -> Exit | None:
    """The end of a process in a message of Open MPI, with its rank."""
    wrapped = " ".join(line.strip() for line in lines)  # Open MPI 5 breaks its sentences
    end = next(filter(None, map(parse_exit, (*lines, wrapped))), None)
    name = next(filter(None, map(_MPI_NAME.search, lines)), None)
    return replace(end, rank=int(name["rank"])) if end and end.rank is None and name else end


def parse_exit(text: str) -> Exit | None:
    """The end of a process that one line reports."""
    if not _FAST.search(text):
        return None
    match = next(filter(None, (form.search(text) for form in _FORMS)), None)
    if match is None:
        return None
    groups = match.groupdict()
    code, signal = _status(groups)
    if code == 0:
        return None
    rank = groups.get("rank")
    return Exit(groups.get("host") or "", int(rank) if rank else None, code, signal,
                is_memory=bool(groups.get("memory")))  # fmt: skip


def _status(groups: dict[str, str | None]) -> tuple[int | None, int | None]:
    """Exit status and signal: a negative status is a signal, and a shell adds 128."""
    if name := groups.get("name") or groups.get("killed"):
        return None, _SIGNALS.get(name, 0)
    if signal := groups.get("signal") or groups.get("string"):
        return None, int(signal)
    if (status := groups.get("status")) and int(status) < 0:
        return None, -int(status)
    if shell := groups.get("shell"):
        return (None, int(shell) - 128) if 128 < int(shell) < 160 else (int(shell), None)
    code = groups.get("code") or groups.get("status")
    return int(code) if code else None, None


def parse_table(lines: Sequence[str]) -> tuple[Exit, ...]:
    """The ends in torchrun's table of failures; the first that failed comes first."""
    exits: list[Exit] = []
    fields: dict[str, str] = {}
    is_root = False
    for line in lines:
        if line.startswith(("Root Cause", "Other Failures")) or line[:1] == "[":
            exits += _table_exit(fields, is_root)
            fields = {}
            is_root = line.startswith("Root Cause") or (is_root and line[:1] == "[")
        elif match := _TABLE_FIELD.match(line):
            fields.setdefault(match["key"], match["value"])
    exits += _table_exit(fields, is_root)
    return tuple(sorted(exits, key=lambda end: not end.is_root))


def _table_exit(fields: dict[str, str], is_root: bool) -> list[Exit]:
    rank, exitcode = (_NUMBER.match(fields.get(key, "")) for key in ("rank", "exitcode"))
    if rank is None or exitcode is None or int(rank[0]) < 0:
        return []
    status = int(exitcode[0])
    code, signal = (status, None) if status >= 0 else (None, -status)
    return [Exit(fields.get("host", "").strip(), int(rank[0]), code, signal, is_root)]


def parse_bad_termination(lines: Sequence[str]) -> tuple[Exit, ...]:
    """The end in the box that MPICH and Intel MPI print."""
    fields: dict[str, str] = {}
    for line in lines:
        if match := _BAD_TERMINATION.search(line):
            fields |= {key: value for key, value in match.groupdict().items() if value}
    code, signal = _status(dict(fields))
    if code is not None and code == 9 and signal is None:
        code, signal = None, 9  # hydra reports signal 9 as exit code 9
    rank = fields.get("rank")
    return (Exit(fields.get("host", ""), int(rank) if rank else None, code, signal),)
