"""How fast a training is, and where its time goes: which rank the others waited for.

After its own backward pass a rank stands still until the gradients of all ranks are there, and
before a forward pass with buffers until rank 0's are. The last to arrive sees the exchange alone;
whatever the others stand still for longer, they waited for it. So the ranks note how long they
stood still, step by step, and put their notes together now and then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from paceline.train.comms import Comms
from paceline.train.parallel import Replica

_NOTES = 512  # steps between two exchanges
_CHEAP = 100  # times the cost of a note: the least time between two notes
_NOTE_SECONDS = 2e-5
_NAMED = 0.05  # a part of the time that is worth the name of a rank
_MOSTLY = 0.5  # of the waiting was for this one rank


@dataclass(frozen=True, slots=True)
class Shares:
    """The time of the steps, as the rank that waits most for others sees it.

    Attributes:
        data: Part in which it waited for its data.
        others: Part in which it waited for slower ranks.
        exchange: Part in which gradients were exchanged and nothing else happened.
        slowest: The rank that was mostly waited for; ``None`` when there is no such rank.
        late: Seconds of a step for which it was waited for.
        its_data: Part of the slowest rank's time in which it waited for its data.
    """

    data: float
    others: float
    exchange: float
    slowest: int | None = None
    late: float = 0.0
    its_data: float = 0.0

    @property
    def computing(self) -> float:
        """The rest: forward and backward passes, the optimizer and the script's own work."""
        return max(0.0, 1 - self.data - self.others - self.exchange)


class Pace:
    """One rank's notes. Every rank must have one, and call it in the same order.

    Args:
        comms: Of all ranks.
        model: What is trained; only DDP is understood, other models give no shares.

    Attributes:
        rate: Global samples a second.
    """

    def __init__(self, comms: Comms, model: nn.Module) -> None:
        self._comms, self._model = comms, model
        self._ddp = isinstance(model, DistributedDataParallel) and not comms.alone
        self._clocks = self._ddp and comms.device.type == "cpu"
        self._every = 1
        self.rate = Rate()
        self._ready, self._still, self._noted = 0.0, 0.0, False  # of the running step
        self._since, self._waited = time.perf_counter(), 0.0  # at the end of the last step
        self._notes: list[tuple[float, float, float]] = []  # whole step, data, standing still
        self._rows: list[Tensor] = []

    def restart(self, waited: float) -> None:
        """Leaves time out that was not spent on training.

        Args:
            waited: Seconds in which this rank waited for its data, from its beginning.
        """
        self._since, self._waited = time.perf_counter(), waited
        self.rate.restart()
        self._in_buffers()

    def before_backward(self, loss: Tensor, step: int) -> None:
        """To be called before a backward pass that exchanges gradients."""
        self._ready = 0.0
        if self._clocks and loss.requires_grad and step % self._every == 0:
            loss.register_hook(self._at_start)  # type: ignore[no-untyped-call]

    def _at_start(self, gradient: Tensor) -> None:
        # The engine calls these at the end of its work in the order in which they came; DDP's,
        # which waits for the exchange, comes later.
        Variable._execution_engine.queue_callback(self._at_end)

    def _at_end(self) -> None:
        self._ready = time.perf_counter()

    def after_backward(self) -> None:
        """To be called after it."""
        if self._ready:
            self._still, self._noted = self._still + time.perf_counter() - self._ready, True

    def step(self, samples: int, waited: float) -> None:
        """To be called at the end of each global step, with its samples over all ranks.

        ``waited`` is as in :meth:`restart`.
        """
        self.rate.add(samples)
        now, buffers = time.perf_counter(), self._in_buffers()
        if self._noted:
            note = (now - self._since, waited - self._waited, self._still + buffers)
            self._notes.append(note)
        self._since, self._waited = now, waited
        self._ready, self._still, self._noted = 0.0, 0.0, False
        if len(self._notes) >= _NOTES:
            self._exchange()

    def _in_buffers(self) -> float:
        """Seconds in which this rank stood still for buffers since it was last asked."""
        if not isinstance(self._model, Replica):
            return 0.0
        seconds, self._model.stood = self._model.stood, 0.0
        return seconds

    def _exchange(self) -> None:
        rows = self._comms.rows(torch.tensor(self._notes, dtype=torch.float64))
        self._notes.clear()
        self._rows.append(rows)
        a_step = float(rows[:, :, 0].mean())  # the same on every rank
        self._every = max(1, int(_NOTE_SECONDS * _CHEAP / max(a_step, 1e-9)))

    def summary(self, steps: int, waited: float) -> str:
        """The training of so many steps, for the user; a collective.

        Args:
            steps: Done by this process; the same on every rank.
            waited: Seconds in which this rank waited for its data.
        """
        shares = self.shares()
        named = shares is not None and shares.slowest is not None
        hosts = self._comms.texts(self._comms.world.host) if named else ()
        return summary(steps, self.rate.samples, self.rate.seconds, waited, shares, hosts)

    def shares(self) -> Shares | None:
        """What came out since the start; a collective. ``None`` where it cannot be known."""
        if self._clocks:
            if self._notes:
                self._exchange()
            return divided(torch.cat(self._rows, dim=1)) if self._rows else None
        if not self._ddp:
            return None
        row = self._comms.rows(torch.tensor([_by_ddp(self._model)], dtype=torch.float64))
        return divided(row) if bool((row[:, :, 0] > 0).all()) else None


def _by_ddp(model: nn.Module) -> tuple[float, float, float]:
    """Mean seconds by DDP's own clocks, which sample some steps: also right on accelerators."""
    assert isinstance(model, DistributedDataParallel)
    said: dict[str, float] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    exchange, compute, overlap = (
        said.get(f"avg_backward_{name}_time", 0) / 1e9
        for name in ("comm", "compute", "compute_comm_overlap")
    )
    still = max(0.0, exchange - overlap)
    return said.get("avg_forward_compute_time", 0) / 1e9 + compute + still, 0.0, still


def divided(notes: Tensor) -> Shares:
    """The shares that notes of all ranks tell.

    Args:
        notes: Seconds of each rank and step: the whole step, waiting for data, standing still
            for gradients and buffers; shape ``[ranks, steps, 3]``.
    """
    whole, data, still = notes.unbind(2)
    exchange = still.min(dim=0)
    waiting = still - exchange.values
    lost = waiting.sum(dim=1)
    rank = int(lost.argmax())
    total = max(float(whole[rank].sum()), 1e-9)
    others = float(lost[rank]) / total
    # Of the rank that came last: how long the first to arrive stood there.
    late = torch.zeros(len(notes), dtype=notes.dtype)
    late.index_add_(0, exchange.indices, waiting.max(dim=0).values)
    slowest = int(late.argmax())
    known = others >= _NAMED and float(late[slowest]) >= _MOSTLY * float(late.sum())
    return Shares(
        float(data[rank].sum()) / total,
        others,
        float(exchange.values.sum()) / total,
        slowest if known else None,
        float(late[slowest]) / notes.shape[1],
        float(data[slowest].sum() / whole[slowest].sum().clamp(min=1e-9)),
    )


class Rate:
    """Global samples a second, of the time that was spent on training.

    Attributes:
        value: Samples a second at the last measurement.
        seconds: Time spent on training, without evaluations.
        samples: Global samples in that time.
    """

    def __init__(self) -> None:
        self.value, self.seconds, self.samples = 0.0, 0.0, 0
        self._since = time.perf_counter()
        self._new = 0

    def add(self, samples: int) -> None:
        """Counts the samples of a global step."""
        self._new += samples

    def measure(self) -> float:
        """Samples a second since the last measurement or restart."""
        now = time.perf_counter()
        passed = max(now - self._since, 1e-9)
        self.value = self._new / passed
        self.seconds, self.samples = self.seconds + passed, self.samples + self._new
        self._since, self._new = now, 0
        return self.value

    def restart(self) -> None:
        """Leaves time out that was not spent on training."""
        self._since = time.perf_counter()


def summary(
    steps: int,
    samples: int,
    seconds: float,
    waited: float,
    shares: Shares | None,
    hosts: Sequence[str] = (),
) -> str:
    """The whole training in one line, and a second one about a rank that holds the others up.

    Args:
        steps, samples: Done in this process's life, over all ranks.
        seconds: Spent on training.
        waited: Seconds of these in which rank 0 waited for data.
        shares: Of all ranks' time; ``None`` where they are not known.
        hosts: Of each rank.
    """
    seconds = max(seconds, 1e-9)
    if shares is None:
        parts = f"waiting for data {min(1.0, waited / seconds):.0%}"
    else:
        parts = (
            f"waiting for data {shares.data:.0%}, waiting for slower ranks {shares.others:.0%},"
            f" communication {shares.exchange:.0%}, computing {shares.computing:.0%}"
        )
    text = (
        f"trained {counted(steps, 'step')}, {counted(samples, 'sample')} in {seconds:.1f} s:"
        f" {samples / seconds:,.0f} samples/s ({parts})"
    )
    if shares is None or shares.slowest is None:
        return text
    itself = f", and waits for its data {shares.its_data:.0%} of the time"
    return (
        f"{text}\nslowest: rank {shares.slowest} on {hosts[shares.slowest]}, for which the others"
        f" wait {shares.late:.3f} s a step{itself if shares.its_data >= 0.1 else ''}"
    )


def counted(number: int, name: str) -> str:
    """``1 step``, ``1,024 steps``."""
    return f"{number:,} {name}{'s' * (number != 1)}"
