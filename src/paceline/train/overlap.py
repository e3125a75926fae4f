"""How much of the exchange of gradients is hidden behind computing, and how more of it could be.

Two things can be chosen without changing a result: the sizes of the buckets, where no order of
additions depends on them (two ranks), and whether updates come late
(:mod:`paceline.train.late`). Which is best depends on model, hosts and network: so each is tried
for a few of the first steps, and the quickest stays. With three and more ranks the sizes are given
by the model alone: where a gradient lies decides in which order the ranks' shares are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.spec.errors import SettingError
from paceline.spec.overlap import OverlapName
from paceline.train.comms import Comms
from paceline.train.communication.coded import Coded
from paceline.train.communication.exact import Exact
from paceline.train.exchange import Exchange, last_first
from paceline.train.late import Late, obstacle
from paceline.train.pace import PARTS, Look
from paceline.train.parallel import Replica
from paceline.train.update import Updater

_PARTS = (8, 16, 32)  # of the gradients make a bucket
_FIRST = 4  # the first bucket is so much smaller
_LEAST = 1 << 16  # bytes of a bucket
_WARM = 2  # steps after a change that do not count: DDP lays its buckets out once more
_EXPOSED = 0.05  # part of a step that is worth the trouble
_BETTER = 0.98  # of the time of the way that needs nothing
_CLEARLY = 0.9  # of the others' time: no other has to be tried
_COMPUTING, _MOVING = PARTS.index("computing"), PARTS.index("moving")
_STEP = [PARTS.index(one) for one in ("computing", "waiting", "moving")]


def check_late(module: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
    """Refuses ``late`` for what can have no late updates.

    Raises:
        SettingError: Says why.
    """
    why = obstacle(module, optimizer)
    if device.type != "cpu":
        why = f"this rank's model is on {device}: updates come late on CPUs only"
    if why:
        remedy = "--overlap auto, which has updates come late where they can"
        raise SettingError("--overlap late cannot be had here", found=why, remedy=remedy)


@dataclass(frozen=True, slots=True)
class Way:
    """One way of exchanging.

    Attributes:
        size, first: Bytes of a bucket and of the first; 0: as they are without us.
        late: Updates come late.
        order: In which buckets are then sent.
    """

    size: int = 0
    first: int = 0
    late: bool = False
    order: tuple[int, ...] = field(default=(), compare=False)


def ways(nbytes: int, ranks: int) -> list[Way]:
    """What is worth a trial, apart from late updates, for so many bytes of gradients."""
    if ranks != 2:  # the sizes stay: see above
        return []
    sizes = dict.fromkeys(max(_LEAST, nbytes // parts) for parts in _PARTS)
    return [Way(size, max(_LEAST, size // _FIRST)) for size in sizes if size < nbytes]


class Overlap:
    """Finds the best way for one model in its first steps. Every rank does the same.

    Args:
        updater: Of the model.
        comms: Of all ranks.
        asked: One of :data:`paceline.spec.overlap.OverlapName`.
        recovers: Lost ranks may be recovered from in place, but where ``late`` was asked for: of a
            step that is half taken then there would be no way back.

    Attributes:
        seconds: Of a step, by way, as far as ways have been tried.
        way: In use.
        done: The trial has ended, or there is nothing to try.
    """

    seconds: dict[Way, float]

    def __init__(
        self, updater: Updater, comms: Comms, asked: OverlapName, *, recovers: bool = False
    ) -> None:
        self._updater, self._comms = updater, comms
        self._asked, self._recovers = asked, recovers
        self._computing = 0.0  # seconds of a step
        self._in_vain: set[str] = set()  # codes by which late updates were tried and are no better
        self.again(0)

    def again(self, step: int) -> None:
        """Begins anew after so many steps: gradients are averaged in another way.

        Where they are coded, how they are divided belongs to the way.
        """
        method, comms = self._exchange.method, self._comms
        plain = method is None
        fits = plain or (isinstance(method, Coded) and self.may_be_late())
        self.done = not fits or not self._tries
        self.way, self.seconds = Way(), {}
        self._left = ways(self._exchange.nbytes, comms.world.size) if plain else []
        self._late_way = (self._left or [Way()])[-1]
        self._since, self._watched = step, not plain
        self._begun = self._code()

    @property
    def _exchange(self) -> Exchange:
        assert self._updater.exchange is not None
        return self._updater.exchange

    @property
    def _tries(self) -> bool:
        comms = self._comms
        return not (comms.alone or comms.mixed or comms.device.type != "cpu")

    def may_be_late_by(self, way: str) -> bool:
        """Whether late updates may come to be used with a way to communicate, by its name."""
        code = "" if way == "exact" else way
        return self._tries and self.may_be_late() and code not in self._in_vain

    def may_be_late(self) -> bool:
        """Whether updates may come late."""
        wanted = self._asked == "late" or (self._asked == "auto" and not self._recovers)
        return wanted and self._could_be_late()

    def forgone(self) -> bool:
        """Whether updates would come late if lost ranks were not recovered from in place."""
        recovers = self._asked == "auto" and self._recovers
        return recovers and self._tries and self._could_be_late()

    def _could_be_late(self) -> bool:
        """Whether nothing needs all gradients or all new parameters at once."""
        one = self._updater
        at_once = (one.clip_norm, one.scaler, one.average)
        if at_once != (None, None, None) or (isinstance(one.model, Replica) and one.model.compiled):
            return False
        return not obstacle(one.module, one.optimizer)

    def looked(self, look: Look, step: int, first: int = 0) -> bool:
        """Takes a look at the last steps, after ``step`` steps of this process.

        Of the first ones, that may have taken longer than later ones, none counts.

        Returns:
            True when this one has settled it.
        """
        if self.done:
            return False
        steps = torch.arange(look.seconds.shape[1]) * look.every + look.first_step
        counted = look.seconds[:, steps >= max(self._since, first) + _WARM]
        if counted.shape[1] < 2:
            return False
        self._computing = float(counted[:, :, _COMPUTING].max(dim=0).values.median())
        whole = counted[:, :, _STEP].sum(2)
        seconds = float(whole.max(dim=0).values.median())
        self.seconds[self.way] = min(seconds, self.seconds.get(self.way, seconds))
        if self.way == Way():
            exposed = counted[:, :, _MOVING].sum(1) / counted.sum((1, 2)).clamp(min=1e-9)
            if float(exposed.min()) < _EXPOSED:
                self.done = True
                self.use(Way())
                return True
        self._next()
        self._since = step
        return self.done

    def _next(self) -> None:
        """Late updates first, where they may be: mostly they win, and other sizes can be left."""
        tried = [one for way, one in self.seconds.items() if way.late]
        if not tried and self.may_be_late():
            if self._watched and self.way == self._late_way:
                late = Way(self._late_way.size, self._late_way.first, True, self._order())
                self.use(late)
            else:  # one look at when each bucket is ready and how long it takes, sent as they come
                self._watched = True
                self._exchange.watched()
                self.use(self._late_way, watched=True)
            return
        other = min(one for way, one in self.seconds.items() if not way.late)
        self._left = [one for one in self._left if one not in self.seconds]
        if self._left and not (tried and tried[0] < _CLEARLY * other):
            self.use(self._left.pop(0))
            return
        best = min(self.seconds, key=lambda one: self.seconds[one])
        if self.seconds[best] > _BETTER * self.seconds[Way()]:
            best = Way()
        if tried and not best.late:
            self._in_vain.add(self._code())
        self.done = True
        self.use(best)

    def _order(self) -> tuple[int, ...]:
        times = self._exchange.times
        lasting = [one.done - one.begun for one in times]
        mine = last_first([one.ready for one in times], lasting, self._computing)
        return tuple(int(one) for one in self._comms.rows(torch.tensor(mine))[0])

    def use(self, way: Way, *, watched: bool = False) -> None:
        """Exchanges so from now on; between two steps."""
        exchange, now = self._exchange, self.way
        if now.late:
            exchange.put_off(None)
        # A hook that only told times goes with its buckets, for it cannot be taken away.
        told = isinstance(exchange.method, Exact) and not (watched or way.late)
        if told or (way.size, way.first) != (now.size, now.first):
            if way.size:
                exchange.buckets(way.size, way.first, plain=not watched)
            else:
                exchange.as_made()
        if way.late:
            late = Late(self._updater.module, self._updater.optimizer, exchange.stood)
            exchange.put_off(late, way.order)
        self.way = way

    def about(self) -> dict[str, Any]:
        """What was found, for the records."""
        seconds = self.seconds.get(self.way, 0.0)
        kept = {"bucket_bytes": self.way.size, "first_bytes": self.way.first}
        return {
            **kept,
            "late": self.way.late,
            "seconds": round(seconds, 6),
            "before": round(self.seconds.get(Way(), seconds), 6),
            "tried": len(self.seconds),
        }

    # -- in checkpoints ------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was found; nothing while the trial goes on."""
        if not self.done:
            return {}
        way = self.way
        kept = {"size": way.size, "first": way.first, "late": way.late, "order": [*way.order]}
        known = {"ranks": self._comms.world.size, "code": self._code()}
        return {**known, "may_be_late": self.may_be_late(), **kept}

    def _code(self) -> str:
        method = self._exchange.method
        return method.name if isinstance(method, Coded) else ""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Uses what was found before at once, if for as many ranks and the same code."""
        if self._begun != self._code():
            self.again(0)
        if self.done or state.get("ranks") != self._comms.world.size:
            return
        if state.get("code", "") != self._code():
            return
        way = Way(state["size"], state["first"], state["late"], tuple(state["order"]))
        if self.may_be_late() and not state.get("may_be_late", way.late):
            return  # late updates were not tried, for then they could not be had
        if not way.late or self.may_be_late():
            self.use(way)
            self.done = True
