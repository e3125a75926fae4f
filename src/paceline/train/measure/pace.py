"""Where the time of each step goes, on every rank, and how fast the training is.

After its own backward pass a rank stands still until the gradients of all ranks are there, and
before a forward pass with buffers until rank 0's are. The last to arrive sees the moving of bytes
alone; whatever the others stand still for longer, they waited for it. No clock has to be compared:
how much later one rank came than another is how much less it stood still.

So every rank notes for each step how long it stood still, and now and then all put their notes
together. That costs no round trip: they are sent at the end of one step and read at the end of the
next, when they have long arrived.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from paceline.spec import events
from paceline.spec.formatting import format_duration
from paceline.train.comms import Comms
from paceline.train.elastic import waits
from paceline.train.measure.vitals import VITALS, Vitals
from paceline.train.parallel import Replica, is_sharded

PARTS = events.PARTS
"""What a step consists of.

``data``: waiting for the rank's own data; ``computing``: forward and backward pass, the optimizer
and the script's own work, in callbacks, too; ``waiting``: for ranks that came later, where
gradients are exchanged or ranks tell each other something else; ``moving``: gradients and buffers
are on their way and nothing else happens; ``saving``: a checkpoint holds the step up; ``other``:
the session's own records and proofs.
"""
_DATA, _COMPUTING, _WAITING, _MOVING, _SAVING, _OTHER = range(len(PARTS))

_IDLE = 0.1  # of the most samples of a rank: who has fewer had nothing to do in most steps
_EVERY = 5  # steps between two looks, at first
_MOST = 512
_COST = 0.005  # part of the time that looks may take
_NOTE_SECONDS, _CHEAP = 2e-5, 100  # a note's cost, and the least time of a step beside it
_TOLD = ("data", "waiting", "moving", "computing", "saving", "other")  # in this order


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """Where the time of some steps went, on all ranks; the same on every rank.

    Attributes:
        first_step: Number of the first of the steps, from 0, of the whole training.
        seconds: Of each part (:data:`PARTS`), shape ``[ranks, steps, parts]``, float64.
        samples: That each rank computed, shape ``[ranks, steps]``, float64.
        elements: Numbers in these samples (tokens, pixels), padding included; likewise.
        facts: What each rank saw of its process and host since the last look, shape
            ``[ranks, vitals]``; see :data:`paceline.train.measure.vitals.VITALS`.
        every: Only each so-manieth step is in it.
    """

    first_step: int
    seconds: Tensor
    samples: Tensor
    elements: Tensor | None = None
    facts: Tensor | None = None
    every: int = 1

    def told(self) -> dict[str, list[Any]]:
        """For the launcher: of each rank the seconds of a step in each part, and its samples a
        second.
        """
        seconds, samples = self.seconds.mean(dim=1), self.samples.mean(dim=1)
        rates = samples / seconds.sum(dim=1).clamp(min=1e-9)
        return {
            "ranks_s": [[round(one, 6) for one in row] for row in seconds.tolist()],
            "rates": [round(one, 2) for one in rates.tolist()],
        }


def at_work(looks: Sequence[Look]) -> list[int]:
    """The ranks that have samples: beside one that was dropped all others would be slow."""
    return [rank for rank, some in enumerate(looks[-1].samples.sum(dim=1).tolist()) if some]


def facts_of(looks: Sequence[Look]) -> Tensor | None:
    """What was seen in all of them together, ``[ranks, facts]``."""
    known = [look.facts for look in looks if look.facts is not None]
    if not known:
        return None
    every = torch.stack(known)
    total = every.nansum(dim=0).where(~every.isnan().all(dim=0), math.nan)
    for name in ("here", "there", "swapped"):  # no differences
        total[:, VITALS.index(name)] = every[-1, :, VITALS.index(name)]
    return total


def steps_of(looks: Sequence[Look]) -> int:
    """How many steps these looks stand for, with those that are not noted."""
    return sum(look.samples.shape[1] * look.every for look in looks)


class _Host:
    """Moments on the CPU, in seconds."""

    @staticmethod
    def mark() -> Any:
        return time.perf_counter()

    @staticmethod
    def between(first: Any, second: Any) -> float:
        return float(second - first)


class _Device:
    """Moments in an accelerator's stream: nobody waits for them until they are long past."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.get_device_module(device).Event
        self._event(enable_timing=True)  # or an error, where it has no such clock

    def mark(self) -> Any:
        made = self._event(enable_timing=True)
        made.record()
        return made

    @staticmethod
    def between(first: Any, second: Any) -> float:
        second.synchronize()
        return float(first.elapsed_time(second)) / 1e3


@dataclass(slots=True)
class _Note:
    """Of one step. Moments are those of the clock; seconds are the CPU's."""

    step: int
    began: Any
    given: Any = None  # the first batch was there
    ended: Any = None
    data: float = 0.0
    saving: float = 0.0
    other: float = 0.0
    met: float = 0.0  # in what ranks tell each other besides gradients
    own: float = 0.0  # in the script's callbacks
    samples: int = 0
    elements: int = 0


_TIMES = 6  # of a note as it is sent: whole, data, standing still, saving, other, met
_COLUMNS = _TIMES + 2  # and samples, elements


class Pace:
    """One rank's notes. Every rank must have one, and call it in the same order.

    Args:
        comms: Of all ranks.
        model: What is trained. Of sharded models it is not known what part of a pass was waiting:
            they give no looks.
        device: Where it is trained.

    Attributes:
        rate: Global samples a second.
        most: Steps between two looks, at most.
    """

    def __init__(self, comms: Comms, model: nn.Module, device: torch.device | None = None) -> None:
        self._comms, self._device = comms, device or comms.device
        self.follow(model)

    def follow(self, model: nn.Module) -> None:
        """Begins anew with another model."""
        self._model, self.rate, self.most = model, Rate(), _MOST
        self.renew()

    def renew(self) -> None:
        """Begins anew, in a new group of ranks; only the rate goes on."""
        comms, model = self._comms, self._model
        self._ddp = isinstance(model, DistributedDataParallel) and not comms.alone
        self._clock: _Host | _Device | None = _clock(self._device)
        if is_sharded(model) or not (comms.alone or self._ddp):
            self._clock = None
        if isinstance(model, Replica) and self._clock is not None:
            model.mark = self._clock.mark
        self._each, self._every = _EVERY, 1  # steps between two looks; each so-manieth is noted
        self._stills: list[tuple[Any, Any]] = []
        self._ready: Any = None
        self._waited, self._saved, self._left = 0.0, 0.0, 0.0
        self._met = self._met_left = comms.met
        self._met_own = 0.0  # in callbacks
        self._note = self._begun(0)
        self._over: list[tuple[_Note, list[tuple[Any, Any]]]] = []
        self._sent: _Sent | None = None
        self._spent, self._cost = 0.0, math.inf  # seconds of notes: since a look, usually
        self._vitals = Vitals(threads=torch.get_num_threads()) if self._ddp else None
        self.totals: Totals | None = None
        self._new: Totals | None = None  # of them not recorded yet

    def _begun(self, step: int) -> _Note:
        return _Note(step, self._clock.mark() if self._clock else None)

    def restart(self, waited: float, saved: float = 0.0) -> None:
        """Leaves time out that was not spent on training; the arguments are as in :meth:`step`."""
        self._note, self._waited, self._saved = self._begun(self._note.step), waited, saved
        self._met = self._comms.met
        self._leave_off()
        self._stills.clear()
        if isinstance(self._model, Replica):
            self._model.stood.clear()
        self.rate.restart()

    def _leave_off(self) -> None:
        """From here to :meth:`leave` the session does what it does after a step."""
        self._left, self._met_left, self._met_own = time.perf_counter(), self._comms.met, 0.0

    # -- in a step -----------------------------------------------------------------------

    def given(self) -> None:
        """The script gets a batch now: to be called when it is there."""
        if self._note.given is None and isinstance(self._clock, _Device):
            self._note.given = self._clock.mark()

    def took(self, count: int, data: Any) -> None:
        """The script has used a batch with so many samples that count."""
        self._note.samples += count
        self._note.elements += elements(data)

    def before_backward(self, loss: Tensor, step: int) -> None:
        """To be called before a backward pass that exchanges gradients, with the step's number."""
        self._note.step, self._ready = step, None
        if self._clock and self._ddp and loss.requires_grad and step % self._every == 0:
            loss.register_hook(self._at_start)  # type: ignore[no-untyped-call]

    def _at_start(self, gradient: Tensor) -> None:
        # The engine calls these at the end of its work in the order in which they came; DDP's,
        # which waits for the exchange, comes later.
        Variable._execution_engine.queue_callback(self._at_end)

    def _at_end(self) -> None:
        assert self._clock is not None
        self._ready = self._clock.mark()

    def after_backward(self) -> None:
        """To be called after it."""
        if self._ready is not None and self._clock is not None:
            self._stills.append((self._ready, self._clock.mark()))
            self._ready = None  # the pieces of the next batch have a backward pass, too

    def step(self, samples: int, waited: float, saved: float = 0.0) -> Look | None:
        """To be called at the end of each global step.

        Args:
            samples: Of the step, over all ranks.
            waited: Seconds in which this rank waited for its data, from its beginning.
            saved: Seconds in which checkpoints held it up, from its beginning.

        Returns:
            Now and then a look at the last steps: the same, at the same step, on every rank.
        """
        self.rate.add(samples)
        if self._clock is None:
            return None
        note, now, look = self._note, time.perf_counter(), None
        note.ended, note.data = self._clock.mark(), waited - self._waited
        note.saving, self._waited, self._saved = saved - self._saved, waited, saved
        note.met, self._met = self._comms.met - self._met, self._comms.met
        self._note = _Note(note.step + 1, note.ended)
        if note.step % self._every == 0:
            stood = self._model.stood if isinstance(self._model, Replica) else ()
            self._over.append((note, [*self._stills, *stood]))
            if self._sent is not None:
                look = self._taken()
            if len(self._over) >= self._each:
                self._send()
        self._stills.clear()
        if isinstance(self._model, Replica):
            self._model.stood.clear()
        self._leave_off()
        self._spent += self._left - now
        return look

    @contextlib.contextmanager
    def own_work(self) -> Iterator[None]:
        """What the script does within it is its own, where the session does something, too."""
        began, met = time.perf_counter(), self._comms.met
        try:
            yield
        finally:
            more = self._comms.met - met
            self._met_own += more
            self._note.own += time.perf_counter() - began - more

    def computed(self) -> float:
        """Seconds for which this rank computed in the last step; 0 where it is not known."""
        if not (self._over and self._over[-1][0].step == self._note.step - 1):
            return 0.0
        whole, *rest = self._row(*self._over[-1])[:_TIMES]
        return max(0.0, whole - sum(rest))

    def leave(self, saved: float = 0.0) -> None:
        """The session has done what it does after a step: the script has control again."""
        note, passed = self._note, time.perf_counter() - self._left
        met = self._comms.met - self._met_left - self._met_own
        note.other = max(0.0, passed - (saved - self._saved) - note.own - self._met_own - met)

    # -- between ranks -------------------------------------------------------------------

    def _send(self, *, all_of_them: bool = False) -> None:
        """Sends what is known of the steps that are over."""
        # What an accelerator does of the last step is not over yet.
        late = isinstance(self._clock, _Device) or self._comms.mixed
        count = len(self._over) - (late and not all_of_them)
        over, self._over = self._over[:count], self._over[count:]
        columns = torch.tensor([self._row(*one) for one in over], dtype=torch.float64)
        vitals = self._vitals.read() if self._vitals else [math.nan] * len(VITALS)
        rest = torch.tensor([self._spent, *vitals], dtype=torch.float64)
        vector = torch.cat([columns.flatten(), rest])
        self._spent = 0.0
        self._sent = _Sent(self._comms, vector, over[0][0].step, count)

    def _row(self, note: _Note, stills: list[tuple[Any, Any]]) -> tuple[float, ...]:
        assert self._clock is not None
        between = self._clock.between
        data, saving, other, met = note.data, note.saving, note.other, note.met
        if isinstance(self._clock, _Device):  # only while it had nothing to do
            left = between(note.began, note.given) if note.given is not None else 0.0
            data = min(data, left)
            saving = min(saving, left - data)
            met = min(met, left - data - saving)
            other = max(0.0, left - data - saving - met - note.own)
        still = sum(between(*one) for one in stills)
        whole = between(note.began, note.ended)
        return whole, data, still, saving, other, met, note.samples, note.elements

    def _taken(self) -> Look | None:
        """What all have sent; ``None`` where a rank was lost meanwhile."""
        assert self._sent is not None
        before, sent, self._sent = time.perf_counter(), self._sent, None
        rows, count = sent.rows(), sent.count
        if rows is None:
            return None
        notes_end = count * _COLUMNS
        notes = rows[:, :notes_end].reshape(-1, count, _COLUMNS)
        # What it costs on a rank that nobody disturbs.
        self._cost = min(1.5 * self._cost, float(rows[:, notes_end].min()))
        facts = rows[:, notes_end + 1 :]
        seconds = divided(notes[:, :, :_TIMES])
        samples, numbers = notes[:, :, _TIMES:].unbind(2)
        look = Look(sent.first, seconds, samples, numbers, facts, self._every)
        some = Totals(seconds.sum(dim=1), count, samples.sum(dim=1))
        self.totals = some if self.totals is None else self.totals + some
        self._new = some if self._new is None else self._new + some
        a_step = max(float(notes[:, :, 0].mean()), 1e-9)
        every = max(1, int(_NOTE_SECONDS * _CHEAP / a_step))
        if every != self._every:
            self._every = every
            self._over.clear()  # the steps of a look are equally far apart
        self._each = min(self.most, max(_EVERY, int(self._cost / (_COST * a_step * self._every))))
        self._spent += time.perf_counter() - before
        return look

    def finish(self) -> list[Look]:
        """The steps since the last look; a collective."""
        looks = [] if self._sent is None else [self._taken()]
        if self._over:
            self._send(all_of_them=True)
            looks.append(self._taken())
        return [one for one in looks if one is not None]

    def shares(self) -> Mapping[str, float] | None:
        """Parts of the time so far, as the rank that waited most for others sees it.

        ``None`` where they are not known.
        """
        return None if self.totals is None else self.totals.shares()

    def figures(self) -> dict[str, Any]:
        """Of the looks since the last call, for the records; empty when there was none.

        Seconds of a step in each part (``computing_s``), as a mean over the ranks and over the
        steps ``noted``; ``ranks_s``: those of each rank, in the order of :data:`PARTS`.
        """
        some, self._new = self._new, None
        if some is None:
            return {}
        every = some.seconds / some.steps
        each = zip(PARTS, every.mean(dim=0).tolist(), strict=True)
        means = {f"{name}_s": round(one, 6) for name, one in each}
        ranks = [[round(one, 6) for one in row] for row in every.tolist()]
        return {"noted": some.steps, **means} | ({"ranks_s": ranks} if len(ranks) > 1 else {})


class _Sent:
    """Notes of this rank on their way to all others.

    Args:
        comms: Of all ranks.
        vector: As long on every rank.
        first: Number of their first step.
        count: How many steps.
    """

    def __init__(self, comms: Comms, vector: Tensor, first: int, count: int) -> None:
        self.first, self.count, self._comms = first, count, comms
        self._lost = comms.stale  # then some ranks have sent theirs to a former group
        if self._lost:
            return
        try:
            self._rows, self._wait = _sent(comms, vector)
        except RuntimeError:
            if comms.mender is None:
                raise
            self._lost = True  # what is done next together finds that out, too

    def rows(self) -> Tensor | None:
        """Of all ranks, on the CPU; ``None`` where a rank was lost meanwhile."""
        return self._comms.event(self._here)

    def _here(self) -> Tensor | None:
        """These were sent some steps ago: that they are here does not say where their ranks are."""
        found = None
        if not (self._lost or self._comms.stale):
            self._wait()
            found = torch.stack(list(self._rows)).clone()
        self._comms.come()
        return found


def _sent(comms: Comms, vector: Tensor) -> tuple[Sequence[Tensor], Callable[[], object]]:
    """Rows that are filled when what is returned beside them was called and has returned."""
    size, device = comms.world.size, comms.device
    if comms.alone:
        return [vector], lambda: None
    if device.type == "cpu":
        rows = [torch.empty_like(vector) for _ in range(size)]
        work = dist.all_gather(rows, vector, group=comms.group, async_op=True)
        if work is not None:
            waits.abandon(work)  # where a rank is lost it stays
        return rows, lambda: waits.wait(work, vector)
    # In a stream of its own: neither the CPU nor the training's stream waits for it.
    library = torch.get_device_module(device)
    home = torch.empty(size, len(vector), dtype=vector.dtype, pin_memory=True)
    with library.stream(library.Stream(device)):
        mine = vector.pin_memory().to(device, non_blocking=True)
        # flat: so gloo, too, takes it
        there = torch.empty(size * len(vector), dtype=vector.dtype, device=device)
        work = dist.all_gather_into_tensor(there, mine, group=comms.group, async_op=True)
        work.wait()
        home.view(-1).copy_(there, non_blocking=True)
        over = library.Event()
        over.record()

    def wait(kept: object = (mine, there)) -> None:
        over.synchronize()

    return list(home), wait


def _clock(device: torch.device) -> _Host | _Device | None:
    if device.type == "cpu":
        return _Host()
    with contextlib.suppress(Exception):  # whatever this torch and driver say
        return _Device(device)
    return None


def elements(data: Any) -> int:
    """Numbers in the tensors of a batch."""
    if isinstance(data, Tensor):
        return data.numel()
    if isinstance(data, Mapping):
        data = data.values()
    elif not isinstance(data, (tuple, list)):
        return 0
    return sum(elements(one) for one in data)


def divided(notes: Tensor) -> Tensor:
    """The parts of each step that notes of all ranks tell.

    Args:
        notes: Seconds of each rank and step: the whole step, waiting for data, standing still
            for gradients and buffers, saving, other, in what ranks tell each other besides; shape
            ``[ranks, steps, 6]``.

    Returns:
        Seconds of :data:`PARTS`, shape ``[ranks, steps, 6]``.
    """
    whole, data, still, saving, other, met = notes.unbind(2)
    moving = still.min(dim=0, keepdim=True).values.expand_as(still)
    telling = met.min(dim=0, keepdim=True).values.expand_as(met)
    computing = (whole - data - still - saving - other - met).clamp(min=0)
    waiting = still - moving + met - telling
    return torch.stack([data, computing, waiting, moving, saving, other + telling], dim=2)


@dataclass(frozen=True, slots=True, eq=False)
class Totals:
    """The sum of looks.

    Attributes:
        seconds: Of each rank and part.
        steps: How many.
        samples: Of each rank.
    """

    seconds: Tensor
    steps: int
    samples: Tensor

    def __add__(self, more: Totals) -> Totals:
        samples = self.samples + more.samples
        return Totals(self.seconds + more.seconds, self.steps + more.steps, samples)

    def shares(self) -> dict[str, float]:
        """Parts of the time of the rank that waited most for others, of those that had work."""
        at_work = self.samples >= _IDLE * self.samples.max()
        waited = self.seconds[:, _WAITING].where(at_work, -1.0)
        rank = int(waited.argmax())
        part = self.seconds[rank] / self.seconds[rank].sum().clamp(min=1e-9)
        return dict(zip(PARTS, part.tolist(), strict=True))


class Rate:
    """Global samples a second, of the time that was spent on training.

    Attributes:
        value: Samples a second at the last measurement.
        seconds: Time spent on training, without evaluations.
        samples: Global samples in that time.
    """

    def __init__(self) -> None:
        self.value, self.seconds, self.samples = 0.0, 0.0, 0
        self._since: float | None = time.perf_counter()
        self._new, self._passed = 0, 0.0  # since the last measurement; seconds before a pause

    def add(self, samples: int) -> None:
        """Counts the samples of a global step."""
        self._new += samples

    def measure(self) -> float:
        """Samples a second since the last measurement or restart."""
        runs = self._since is not None
        self.pause()
        if runs:
            self.restart()
        passed = max(self._passed, 1e-9)
        self.value = self._new / passed
        self.seconds, self.samples = self.seconds + passed, self.samples + self._new
        self._new, self._passed = 0, 0.0
        return self.value

    def pause(self) -> None:
        """The training is interrupted: until :meth:`restart` no time counts."""
        if self._since is not None:
            self._passed += time.perf_counter() - self._since
            self._since = None

    def restart(self) -> None:
        """The training goes on; time that was not spent on it is left out."""
        self._since = time.perf_counter()


def summary(
    steps: int,
    samples: int,
    seconds: float,
    waited: float,
    shares: Mapping[str, float] | None,
    slowest: str = "",
) -> str:
    """The whole training in one line, and a second one about a rank that held the others up.

    Args:
        steps, samples: Done in this process's life, over all ranks.
        seconds: Spent on training.
        waited: Seconds of these in which rank 0 waited for data.
        shares: Parts of the time; ``None`` where they are not known.
        slowest: The second line.
    """
    seconds = max(seconds, 1e-9)
    if shares is None:
        parts = f"waiting for data {min(1.0, waited / seconds):.0%}"
    else:
        parts = ", ".join(
            f"{events.PART_NAMES[name]} {shares[name]:.0%}" for name in _TOLD
            if shares[name] >= 0.005 or name not in ("saving", "other")
        )  # fmt: skip
    text = (
        f"trained {counted(steps, 'step')}, {counted(samples, 'sample')} in"
        f" {format_duration(seconds)}: {samples / seconds:,.0f} samples/s ({parts})"
    )
    return f"{text}\n{slowest}" if slowest else text


def counted(number: int, name: str) -> str:
    """``1 step``, ``1,024 steps``."""
    return f"{number:,} {name}{'s' * (number != 1)}"
