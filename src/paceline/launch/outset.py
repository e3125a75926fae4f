"""Whether the ranks of an attempt have anything to lose yet, and what is nobody's fault. Pure.

Before its first step a training has learnt nothing. Whoever is lost by then costs a start and no
more, so the job begins again by itself: :mod:`paceline.launch.restart` asks here.
"""

from __future__ import annotations

import signal

from paceline.launch.outcome import for_its_memory
from paceline.spec.events import Event
from paceline.spec.failure import Failure
from paceline.spec.job import Job

_LINE = 300  # bytes of a line
_HOSTS = ("lost", "agent", "lease", "forkserver", "launcher")
# A program that crashes would do so again.
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT,
            signal.SIGSYS, signal.SIGTRAP, signal.SIGXCPU, signal.SIGXFSZ)  # fmt: skip


def trains(job: Job) -> bool:
    """Whether the job is seen to be a session of ``paceline.train``, before any rank says so."""
    return any(module.startswith("paceline.") for module in job.preload)


def by_chance(failure: Failure) -> bool:
    """Whether it is nobody's fault: a host, an agent, a fork server, a kill from outside.

    Or this launcher itself, when it was stopped, or asleep, for so long that its nodes left.

    Not what the program does by itself (an exception, an exit, a crash, its memory), and not what
    somebody has wished for: SIGTERM.
    """
    if failure.kind in _HOSTS:
        return True
    killed = failure.kind == "signal" and failure.signal not in _CRASHES
    return killed and not failure.wished and not for_its_memory(failure)


class Outset:
    """Hears the events of one attempt.

    Args:
        job: Of which it is.
        ranks: How many there are.

    Attributes:
        told: By rank, the end of the last line that it has written for people.
    """

    def __init__(self, job: Job, ranks: int) -> None:
        self.session = trains(job)
        python = job.entry.kind in ("script", "module") and job.needs_torch
        self._meets = python and ranks > 1 and not job.own_store
        self._ran = False
        self._shown = False  # a script has: to people, or to its other ranks
        self._from = 0  # the step of the checkpoint that it goes on from
        self._step = 0  # the latest that was told
        self.told: dict[int, str] = {}

    def heard(self, event: Event) -> None:
        """What an agent or a rank says."""
        if event.kind == "rank started":
            self._ran = True
        elif event.kind in ("joined", "recoverable"):
            self.session = True
        elif event.kind in ("output", "world joined"):
            self._shown = True
            if event["stream"] == "out" and (line := event.blob.rstrip().rpartition(b"\n")[2]):
                self.told[event.rank or 0] = line[-_LINE:].decode(errors="replace")
        elif event.kind == "resumed":
            self._from = max(self._from, event["step"] or 0)
        elif event.kind in ("heartbeat", "progress", "metrics"):
            self._step = max(self._step, event["step"] or 0)

    @property
    def last_told(self) -> str:
        """That of the first rank which has written anything."""
        return self.told[min(self.told)] if self.told else ""

    @property
    def over(self) -> bool:
        """Whether a start from the beginning would lose, or repeat, something.

        Of a session that is known by its steps. Of any other script nobody sees the first step:
        it can have made none with others before the ranks have met, and has done nothing that
        anybody has seen before it wrote something. What needs nobody may have done anything.
        """
        if self.session:
            return self._step > self._from
        return self._ran and (self._shown or not self._meets)
