"""Finds how a job ended: whether it failed, what failed first, and what only followed. Pure."""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.explain.exit_reports import parse_exit
from paceline.explain.units import Exit, Unit
from paceline.spec.failure import COLLECTIVE_TIMEOUT, SECONDARY_ERROR, WORKER_GONE, Failure

SURVIVED = 3  # signs of life after an error that the job survived
RESTARTED = 7  # the same, if a process ended and all were started again, up to a good end
REQUEUED = 60  # the same, of a job that its scheduler ended and that has no good end
MAX_RANKS = 100_000
MAX_LAST_WORDS = 12
MAX_UNITS = 400  # of one role; of more, the first and the last
_LAUNCHER_ERRORS = ("ChildFailedError", "CalledProcessError", "SignalException", "SystemExit",
                    "ProcessExitedException", "ProcessRaisedException")  # fmt: skip
PROGRAMMING_ERRORS = {
    "ZeroDivisionError", "KeyError", "IndexError", "TypeError", "AttributeError", "NameError",
    "UnboundLocalError", "AssertionError", "ValueError", "NotImplementedError", "StopIteration",
    "RecursionError", "ImportError", "ModuleNotFoundError", "FileNotFoundError",
    "UnicodeDecodeError",
}  # fmt: skip
_UNLABELED: tuple[str, int | None] = ("", None)
_STRONG = ("traceback", "crash", "exit", "numeric")
_NCCL_RANK = re.compile(
    r"(?P<host>[\w.-]{1,253}):(?P<pid>\d{1,9}):\d.{0,200}"
    r"\brank (?P<rank>\d{1,9}) n[rR]anks (?P<size>\d{1,6})"
)
_NCCL_PROCESS = re.compile(
    r"(?:\[[^\]]{1,40}\] )?(?P<host>[\w.-]{1,253}):(?P<pid>\d{1,9}):\d{1,9} \["
)
_RANK_IN_TEXT = re.compile(r"\[?(?:PG .{0,60})?\b[Rr]ank (?P<rank>\d{1,9})\]")
_CONSEQUENCE = re.compile(
    r"dump signal|Failed to check the \"should dump\"|To avoid data inconsistency|"
    r"Some NCCL operations have failed|failure detected by watchdog|First PG on this rank|"
    r"Stack trace of the failed collective|preparing to dump|HeartbeatMonitor|closing signal SIG|"
    r"operation was aborted|communicator was aborted|Could not acquire GIL"
)
_WATCHDOG_ABORT = re.compile(
    r"taking the entire process down|watchdog thread terminated with exception|"
    r"Watchdog caught collective operation timeout"
)
_RAY_NODE = re.compile(r"^\s{1,8}ip: (?P<host>[\w.:]{1,100})$", re.MULTILINE)
_EXITED_WELL = re.compile(r"(?P<host>[\w.-]{1,253}) exited with code 0$")
# DDP found no parameters on a rank that did not come to its check
_ABSENT_MODEL = re.compile(r"while rank \d{1,9} has inconsistent 0 params")
_MISMATCH = re.compile(r"collective mismatch error|Mismatched collective")
_CANCELLED = re.compile(r"\*\*\* (?:JOB|STEP) [\d.]{1,20} ON .{0,300} CANCELLED AT ")
_ANNOUNCED = re.compile(r"(?i:spot instance interruption|\b(?:is|was|be|being) preempted)")
_OF_TASK = re.compile(r"slurmstepd[\w.-]{0,253}: error: (?:pyxis|spank)")
_EVICTED = re.compile(r"\s{0,9}Warning {2,9}Evicted ")
_BUILD_FAILED = re.compile(
    r"Error building extension|Command '?\[?'?\S{0,200}"
    r"(?:ninja|gcc|g\+\+|cc|c\+\+|clang|nvcc|hipcc|icpx)\b.{0,2000}non-zero exit status"
)
_COMPILER_ERROR = re.compile(r":\d{1,6}: fatal error: |^/?\S{0,200}\bld: cannot find ")
_STAGE_END = re.compile(r"(?i:\bsav(?:ed|ing)\b|^\W{0,4}done \(t=)")  # training may go on
_WAITED = re.compile(  # in vain, for another process that did not end
    rf"{COLLECTIVE_TIMEOUT.pattern}|(?i:trying to connect|connect(?:ion)? (?:to \S{{1,300}} )?:? ?"
    r"(?:failed|timed out|timeout)|failed to connect|no route to host|(?:network|host) is "
    r"(?:unreachable|down))"
)
_KERNEL_CONCERN = re.compile(
    r"NVRM: |Xid|\bmlx[45]_|amdgpu|i915|\bxe \d|nfs: server|EDAC|Hardware Error|mce:|"
    r"(?:Killed process \d{1,12} \(|oom-kill:.{0,300}task=)(?:python|pt_|torchrun|ray|deepspeed"
    r"|train|cc1plus|"
    r"ninja|nvcc|ptxas|cicc|slurmstepd|node|a\.out)|python[\d.]*\[\d{1,9}\]: segfault|"
    r"(?:python|pt_)\w*.{0,40}invoked oom-killer|Remounting filesystem read-only|"
    r"pids controller|hfi1|irdma|bnxt_re"
)


# What the kernel reports as lost, and as working again
_KERNEL_SUBJECT = r"(?P<subject>nfs: server \S{1,253}|\S{1,40} \S{1,40}:) "
_KERNEL_LOSS = re.compile(rf"{_KERNEL_SUBJECT}(?:not responding|(?:NIC )?Link (?:is )?[Dd]own)")
_KERNEL_RETURN = re.compile(rf"{_KERNEL_SUBJECT}(?:OK\b|(?:NIC )?Link (?:is )?[Uu]p)")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended.

    Attributes:
        failures: Errors that ended processes by themselves, the first of them first.
        context: Errors and warnings that nothing shows to be survived, and that may explain them.
        consequences: Errors of processes that lost a peer or were stopped.
        exits: Reported ends of processes, those that the launcher stopped left out.
        ranks: All ranks that the log knows of.
        running: Those that went on after the first error that ended a process.
    """

    failures: tuple[Unit, ...] = ()
    context: tuple[Unit, ...] = ()
    consequences: tuple[Unit, ...] = ()
    exits: tuple[Exit, ...] = ()
    ranks: frozenset[int] = frozenset()
    running: frozenset[int] = frozenset()

    @property
    def first(self) -> Unit | None:
        """The unit that ended the job."""
        return next(iter((*self.failures, *self.consequences, *self.context)), None)

    @property
    def has_failed(self) -> bool:
        """Whether a process ended badly, or a library reports an error and nothing went on."""
        return any(unit.kind in _STRONG or (unit.kind == "library" and unit.level == "error")
                   for unit in self.searched)  # fmt: skip

    def group(self, unit: Unit) -> int:
        """0 for the first failure and what may explain it, 1 for later ones, 2 for consequences."""
        if unit in self.consequences:
            return 2 if self.failures else 0
        return int(unit in self.failures[1:] and not _is_same_process(unit, self.failures[0]))

    @property
    def searched(self) -> tuple[Unit, ...]:
        """What rules search, in order."""
        return (*self.failures, *self.context, *self.consequences)


def judge(
    units: Sequence[Unit], failure: Failure | None = None, has_failed: bool = False
) -> Outcome:
    """Judges the units of all streams.

    Args:
        units: In the order of time, as far as it is known.
        failure: The first failure by the launcher's own records.
        has_failed: Whether it is known from elsewhere that the job failed.
    """
    units = _locate([_as_exit(unit) for unit in units])
    life = _Life(units)
    strong = [unit for unit in units if unit.kind in _STRONG and not unit.is_handled]
    survivors = [unit for unit in strong if not life.continued_after(unit)]
    if not survivors and (has_failed or _ends_with_exit(strong, life)):
        survivors = strong
    if any(map(_names_error, survivors)):  # tracebacks that others interrupt say nothing more
        survivors = [unit for unit in survivors if unit.kind != "traceback" or _names_error(unit)]
    root = _root(failure, survivors)
    aborted = any(unit.kind in ("library", "crash") and _WATCHDOG_ABORT.search(unit.text)
                  for unit in units)  # fmt: skip

    def follows(unit: Unit) -> bool:
        return is_consequence(unit) or (aborted and _is_abort(unit))

    primary = [unit for unit in survivors if not follows(unit)]
    consequences = [unit for unit in survivors if follows(unit)]
    primary.sort(key=lambda unit: (not _concerns(unit, root), unit.kind == "exit"))
    recovered = _recovered(units)
    weak = [
        unit
        for unit in units
        if _is_weak(unit)
        and id(unit) not in recovered
        and (not life.continued_after(unit) or (survivors and _ANNOUNCED.search(unit.text)))
    ]
    if survivors:
        weak = [_attribute(unit, primary) for unit in weak]
        weak = _admissible(weak, primary) + _last_words(units, primary or consequences)
        weak += _compiler_errors(units, primary)
    else:
        weak = _alarming(weak, life)
    followers = [unit for unit in weak if is_consequence(unit)]
    return Outcome(
        failures=_bounded(primary),
        context=_bounded([unit for unit in weak if not is_consequence(unit)]),
        consequences=_bounded(consequences + followers),
        exits=tuple(
            end for unit in survivors for end in unit.exits if end.signal != signal.SIGTERM
        ),
        ranks=_known_ranks(units),
        running=_running_ranks(units, min((unit.number for unit in survivors), default=0)),
    )


def _names_error(unit: Unit) -> bool:
    """Whether it is a traceback with its last line."""
    return unit.error is not None and bool(unit.error.type)


def is_consequence(unit: Unit) -> bool:
    """Whether a unit shows a process that lost a peer or was stopped."""
    if unit.kind == "exit":
        return all(end.signal in (signal.SIGTERM, signal.SIGINT) for end in unit.exits)
    if unit.error is not None and unit.error.type.endswith("KeyboardInterrupt"):
        return True
    if unit.kind == "traceback" and WORKER_GONE.search("\n".join(unit.lines)):
        return False
    if _CONSEQUENCE.search(unit.text) and unit.kind != "traceback":
        return True
    if unit.kind == "traceback" and _ABSENT_MODEL.search(unit.text):
        return True
    if unit.kind in ("traceback", "crash", "library") and not _MISMATCH.search(unit.text):
        return bool(COLLECTIVE_TIMEOUT.search(unit.text) or SECONDARY_ERROR.search(unit.text))
    return False


def _is_abort(unit: Unit) -> bool:
    """Whether it reports nothing but processes that aborted, as torch's watchdog makes them."""
    return unit.kind == "exit" and all(
        end.signal in (signal.SIGABRT, signal.SIGTERM, signal.SIGINT) for end in unit.exits
    )


class _Life:
    """Signs of life after each unit, by stream."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._after: dict[int, tuple[int, int, int, int, bool]] = {}
        self._job_ended_after: set[int] = set()
        self._own_after: dict[int, tuple[int, int]] = {}
        self._ended_well: set[int] = set()
        by_stream: dict[tuple[str, int | None], int] = defaultdict(int)
        by_rank: dict[int | None, int] = defaultdict(int)
        by_host: dict[str, int] = defaultdict(int)
        everywhere = progress = 0
        finished = has_job_ended = False
        ended_well: set[str] = set()
        for unit in reversed(units):
            stream, sign = (unit.host, unit.rank), unit.sign_of_life
            if not sign:  # signs of life are never asked about
                self._after[id(unit)] = (by_stream[stream], by_stream[_UNLABELED], everywhere,
                                         progress, finished)  # fmt: skip
                self._own_after[id(unit)] = (by_rank[unit.rank], by_host[unit.host] + by_host[""])
                if has_job_ended:
                    self._job_ended_after.add(id(unit))
                if unit.host in ended_well:
                    self._ended_well.add(id(unit))
                continue
            if unit.kind == "finish":
                finished = True
                has_job_ended |= not _STAGE_END.search(unit.text)
                if exit_report := _EXITED_WELL.match(unit.text):
                    ended_well.add(exit_report["host"])
            by_stream[stream] += sign
            by_rank[unit.rank] += sign
            by_host[unit.host] += sign
            everywhere += sign * (unit.kind != "text")
            progress += unit.kind == "progress"
        self.was_seen = everywhere > 0
        self._ranks = {rank for rank, signs in by_rank.items() if rank is not None and signs}
        self._hosts = {host for host, signs in by_host.items() if host and signs}
        self._ended_before = _ended_before(units)

    def had_ended(self, unit: Unit) -> bool:
        """Whether its process, or the job, had finished before it."""
        return id(unit) in self._ended_before

    def continued_after(self, unit: Unit) -> bool:
        in_stream, unlabeled, everywhere, progress, finished = self._after[id(unit)]
        if id(unit) in self._ended_well and unit.kind != "exit":
            return True
        if unit.kind == "numeric":
            return progress >= 2
        if unit.kind in ("traceback", "crash"):
            needed = 1 if unit.level == "logged" else SURVIVED
            return in_stream >= needed or (finished and everywhere >= RESTARTED)
        if unit.kind in ("text", "warning") and (unit.host or unit.rank is not None):
            return in_stream >= SURVIVED
        if unit.kind == "library" and _EVICTED.match(unit.text):
            return id(unit) in self._job_ended_after
        if unit.kind == "library" and _CANCELLED.search(unit.text):
            return everywhere >= (RESTARTED if id(unit) in self._job_ended_after else REQUEUED)
        signs = everywhere
        if unit.kind == "library" and unit.rank is not None:
            signs = in_stream + unlabeled
        elif unit.kind in ("exit", "kernel", "library"):
            signs = self._signs_of_own(unit, everywhere)
        return signs >= SURVIVED - (unit.level != "error")

    def _signs_of_own(self, unit: Unit, everywhere: int) -> int:
        """Signs of life, after the unit, of the process or host that it is about.

        ``everywhere``, those of all, if the log does not tell them apart. Others go on for a while
        after one process ended.
        """
        of_rank, of_host = self._own_after[id(unit)]
        if unit.rank in self._ranks:
            return of_rank
        return of_host if unit.host in self._hosts else everywhere


def _ended_before(units: Sequence[Unit]) -> set[int]:
    """The ids of libraries' units that stand behind the end of their process or of the job.

    The job has ended if the last sign of any process is a good end, a process if its own is. A
    saved checkpoint is an end of its own process at most.
    """
    ended = set()
    last: dict[tuple[str, int | None], bool] = {}
    has_job_ended = False
    for unit in units:
        stream = (unit.host, unit.rank)
        if unit.kind in ("progress", "finish"):
            last[stream] = unit.kind == "finish"
            has_job_ended = last[stream] and not _STAGE_END.search(unit.text)
        elif unit.kind == "library" and (has_job_ended or last.get(stream)):
            ended.add(id(unit))
    return ended


def _ends_with_exit(strong: Sequence[Unit], life: _Life) -> bool:
    """Whether the log ends with a launcher's report of a failure."""
    return any(unit.kind == "exit" and not is_consequence(unit) and not life.continued_after(unit)
               for unit in strong)  # fmt: skip


def _is_weak(unit: Unit) -> bool:
    if unit.kind == "kernel":
        return bool(_KERNEL_CONCERN.search(unit.text))
    return (unit.kind in ("library", "text") and unit.level in ("error", "warning")) or (
        unit.kind == "warning"
    )


def _attribute(unit: Unit, primary: Sequence[Unit]) -> Unit:
    """Gives what a process without a label wrote the host and rank of the failure it explains."""
    is_of_task = unit.kind in ("text", "warning") or _OF_TASK.match(unit.text) is not None
    if unit.host or unit.rank is not None or not is_of_task:
        return unit
    if not primary or primary[0].rank is None:
        return unit
    return replace(unit, host=primary[0].host, rank=primary[0].rank)


def _recovered(units: Sequence[Unit]) -> set[int]:
    """The ids of the kernel's messages of a return, and of the loss before it."""
    recovered = set()
    returned: set[tuple[str, str]] = set()
    for unit in reversed(units):
        if unit.kind != "kernel":
            continue
        if match := _KERNEL_RETURN.search(unit.text):
            returned.add((unit.host, match["subject"]))
            recovered.add(id(unit))
        elif (match := _KERNEL_LOSS.search(unit.text)) and (
            unit.host,
            match["subject"],
        ) in returned:
            recovered.add(id(unit))
    return recovered


def _admissible(weak: list[Unit], primary: Sequence[Unit]) -> list[Unit]:
    """Leaves out what cannot explain the first failure, since that explains itself."""
    first = primary[0] if primary else None
    if first is None or first.error is None or not first.error.is_in_script:
        return weak
    if first.error.type not in PROGRAMMING_ERRORS:
        return [unit for unit in weak if unit.kind == "kernel" or unit.rank in (None, first.rank)]
    return [unit for unit in weak if unit.kind == "kernel"]


def _alarming(weak: list[Unit], life: _Life) -> list[Unit]:
    """What counts where no process is known to have ended badly.

    Nothing does unless one is an error or the kernel's. Python's warnings never count.
    """
    weak = [unit for unit in weak if unit.kind != "warning"]
    if not life.was_seen:  # the log does not even show that a process ran
        return weak
    weak = [unit for unit in weak if unit.kind != "library" or not life.had_ended(unit)
            or _WAITED.search(unit.text)]  # fmt: skip
    is_alarming = any(unit.level == "error" or unit.kind == "kernel" for unit in weak)
    return weak if is_alarming else []


def _root(failure: Failure | None, units: Sequence[Unit]) -> Exit | None:
    """The process that failed first, by the launcher."""
    if failure is not None:
        return Exit(failure.host, failure.rank, failure.code, failure.signal, is_root=True)
    ends = [end for unit in units for end in unit.exits]
    return next((end for end in ends if end.is_root), None)


def _concerns(unit: Unit, root: Exit | None) -> bool:
    if root is None or root.rank is None or unit.rank is None:
        return True
    return unit.rank == root.rank


def _last_words(units: Sequence[Unit], ends: Sequence[Unit]) -> list[Unit]:
    """What was printed just before a process ended without an exception."""
    if not ends or any(unit.kind != "exit" for unit in ends):
        return []
    first = ends[0]
    before = [unit for unit in units
              if unit.number < first.number and unit.host in ("", first.host)]  # fmt: skip
    words = [replace(unit, kind="text", level="error") if unit.kind == "foreign" else unit
             for unit in before if (unit.kind == "text" and not unit.level)
             or (unit.kind == "foreign" and unit.text.startswith("ERROR: "))]  # fmt: skip
    return words[-MAX_LAST_WORDS:]


def _compiler_errors(units: Sequence[Unit], primary: Sequence[Unit]) -> list[Unit]:
    """What a compiler reported before the first failure, if that is of building an extension."""
    if not primary or not _BUILD_FAILED.search(primary[0].text):
        return []
    first = primary[0]
    errors = [unit for unit in units if unit.kind == "foreign" and unit.number < first.number
              and unit.host in ("", first.host) and _COMPILER_ERROR.search(unit.text)]  # fmt: skip
    return [replace(unit, kind="text", level="error", host=first.host, rank=first.rank)
            for unit in errors[-MAX_LAST_WORDS:]]  # fmt: skip


def _known_ranks(units: Sequence[Unit]) -> frozenset[int]:
    """The ranks of all streams, and those of NCCL's communicators."""
    matches = filter(None, map(_communicator, units))
    sizes = [min(int(match["size"]), MAX_RANKS) for match in matches]
    ranks = {unit.rank for unit in units if unit.rank is not None}
    return frozenset(ranks | set(range(max(sizes, default=0))))


def _running_ranks(units: Sequence[Unit], number: int) -> frozenset[int]:
    """The ranks with a sign of life behind a line of the log."""
    later = (unit for unit in units if unit.rank is not None and unit.number > number)
    return frozenset(unit.rank for unit in later if unit.rank is not None and unit.sign_of_life > 1)


def _communicator(unit: Unit) -> re.Match[str] | None:
    """The rank, its process and the number of ranks, if NCCL reports a communicator."""
    return _NCCL_RANK.search(unit.text) if unit.kind == "library" and "anks" in unit.text else None


def _is_same_process(unit: Unit, other: Unit) -> bool:
    return unit.kind == "exit" or None in (unit.rank, other.rank) or unit.rank == other.rank


def _as_exit(unit: Unit) -> Unit:
    """Treats a launcher's own exception as the report of an end."""
    error = unit.error
    if error is None or error.type.rpartition(".")[2] not in _LAUNCHER_ERRORS:
        return unit
    end = parse_exit(error.message)
    if end is None:
        return replace(unit, is_handled=True)
    return replace(unit, kind="exit", exits=(end,), errors=())


def _locate(units: list[Unit]) -> list[Unit]:
    """Completes host and rank of units from other units."""
    ranks: dict[tuple[str, str], int] = {}
    hosts: dict[int, str] = {}
    for unit in units:
        if match := _communicator(unit):
            ranks[match["host"], match["pid"]] = int(match["rank"])
            hosts.setdefault(int(match["rank"]), match["host"])
        for end in unit.exits:
            if end.rank is not None and end.host:
                hosts[end.rank] = end.host
        if unit.rank is not None and unit.host:
            hosts.setdefault(unit.rank, unit.host)
    ends = [end for unit in units for end in unit.exits if end.signal != signal.SIGTERM]
    ends.sort(key=lambda end: not end.is_root)
    return [_located(unit, ranks, hosts, ends) for unit in units]


def _located(unit: Unit, ranks: dict[tuple[str, str], int], hosts: dict[int, str],
             ends: Sequence[Exit]) -> Unit:  # fmt: skip
    host, rank = unit.host, unit.rank
    if unit.kind == "library":
        process = _NCCL_PROCESS.match(unit.text)
        if process is not None:
            host = host or process["host"]
            rank = ranks.get((process["host"], process["pid"])) if rank is None else rank
        named = _RANK_IN_TEXT.search(unit.text)
        if rank is None and named is not None:
            rank = int(named["rank"])
    if unit.kind == "traceback" and not host and (node := _RAY_NODE.search(unit.text)):
        host = node["host"]
    if unit.kind == "exit" and rank is None and host and len(unit.exits) == 1:
        rank = unit.exits[0].rank  # the host is the launcher's
    is_error = unit.kind in _STRONG or (unit.kind == "text" and unit.level == "error")
    if is_error and rank is None and not host:
        own = next(iter(unit.exits), None)
        is_memory = own is not None and own.is_memory and not own.host
        candidates = [end for end in ends if end.is_memory and end.host] if is_memory else []
        if own is not None and (own.host or own.rank is not None):
            candidates = [own]
        end = next(iter(candidates or ends), None)
        if end is not None:
            host, rank = end.host, end.rank
    if rank is not None and not host:
        host = hosts.get(rank, "")
    return unit if (host, rank) == (unit.host, unit.rank) else replace(unit, host=host, rank=rank)


def _bounded(units: list[Unit]) -> tuple[Unit, ...]:
    half = MAX_UNITS // 2
    return tuple(units if len(units) <= MAX_UNITS else [*units[:half], *units[-half:]])
