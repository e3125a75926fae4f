"""Who computes how much of each global batch in a session: as it was asked for, or by speed.

The decisions are ``data/balance.py``'s; here they are made the session's, said, recorded,
kept in checkpoints and resumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn

from paceline.spec.errors import SettingError
from paceline.spec.formatting import format_duration
from paceline.spec.training import balance
from paceline.train import parallel
from paceline.train.comms import Comms
from paceline.train.data.balance import (
    OFFERED,
    OFFERED_S,
    Advice,
    Controller,
    Shares,
    apportioned,
    by_host,
    even,
    resumed,
)
from paceline.train.data.loader import Progress
from paceline.train.journal import Journal
from paceline.train.measure.pace import Look
from paceline.train.models import ALONE, Models

Wish = Literal["auto", "even"] | Mapping[str, float]
"""By the ranks' speeds, all alike, or by a weight for each host."""

LOOKS = 8
"""Most steps between two looks where shares follow the speeds."""
_OF_STATISTICS = 4  # samples from which batch normalisation makes its statistics, at least


def wished(said: str | Mapping[str, float]) -> Wish:
    """What a script asks for, also as it would be typed. SettingError where that is nothing."""
    if not isinstance(said, str):
        return said
    try:
        return balance.parse_weights(said)
    except SettingError as error:
        raise SettingError(
            f"balance={said!r} cannot be understood",
            found=error.found,
            remedy='balance="auto", "even", or a weight for each host: "n1=3,n2=1"',
        ) from None


class Division:
    """A session's shares. Every rank has one and calls it in the same order.

    Its state belongs to the checkpoint: a resumed run begins with the shares that it had.

    Args:
        comms: Of all ranks.
        journal: Where changes are recorded and said.
        progress: Of the session; says whether there are ranks without a share.

    Attributes:
        shares: Samples of each rank in a whole global batch; ``None`` while they are even.
    """

    def __init__(self, comms: Comms, journal: Journal, progress: Progress) -> None:
        self._comms, self._journal, self._progress = comms, journal, progress
        self._wish: Wish = "even"
        self._controller: Controller | None = None
        self._hosts: tuple[str, ...] = ()
        self._called: list[str] = []  # the ranks
        self._kept: Mapping[str, Any] = {}  # of a checkpoint, until the training begins
        self._global_batch, self._drop_slow = 0, False
        self._offers = 0  # looks in a row that saw something to win
        self._offered = False
        self._named: set[int] = set()
        self._fits: list[tuple[str, int]] = []  # host and limit of each rank, found by trying
        self.shares: Shares | None = None

    @property
    def follows(self) -> bool:
        """Shares may change while training."""
        return self._wish == "auto"

    @property
    def some_idle(self) -> bool:
        """Some rank has nothing to compute."""
        return self.shares is not None and not all(self.shares)

    def check(self, wish: Wish, drop_slow: bool, global_batch: int) -> None:
        """Refuses what cannot be; a collective for weights of hosts.

        Raises:
            SettingError: Says what.
        """
        if wish not in ("auto", "even") if isinstance(wish, str) else not _are_weights(wish):
            raise SettingError(
                f"balance={wish!r} cannot be understood",
                remedy='balance="auto", "even", or a weight for each host: {"n1": 3, "n2": 1}',
            )
        balance.validate(_typed(wish), drop_slow=drop_slow)
        ranks = self._comms.world.size
        if wish != "even" and global_batch < ranks:
            raise SettingError(
                f"--global-batch {global_batch} cannot be shared unevenly among {ranks} processes",
                found="there are fewer samples in a step than processes",
                remedy=f"--global-batch {8 * ranks}, or --balance even",
            )
        if not isinstance(wish, str):
            there = self._comms.texts(self._comms.world.host)
            balance.validate_weights(wish, self._comms.world.hosts or there)

    def begin(
        self,
        wish: Wish,
        drop_slow: bool,
        global_batch: int,
        models: Models,
    ) -> None:
        """Takes the shares with which the training begins.

        Args:
            wish: As it was stated.
            drop_slow: A rank without which steps would be faster gets nothing.
            global_batch: Samples of a step.
            models: Of the session.

        Raises:
            SettingError: The models cannot be trained so.
        """
        ranks, former, self._wish = self._comms.world.size, self._wish, wish
        self._global_batch, self._drop_slow = global_batch, drop_slow
        if self._comms.alone:
            return
        if wish != "even":
            _refuse(models, wish, drop_slow)
        if not self._hosts:
            self._called = self._comms.texts(self._comms.called)
            self._hosts = tuple(one.partition(" on ")[2] for one in self._called)
        least = min(
            _OF_STATISTICS if needs_two(models.module) else 1, max(1, global_batch // ranks)
        )
        resting = self._resting()
        shares: Shares | None = None
        if not isinstance(wish, str):
            shares = by_host(wish, self._hosts, global_batch, least)
        elif wish == "auto" and self._kept:
            shares = resumed(self._kept, self._hosts, global_batch, least)
        elif wish == "auto" == former and self.shares is not None:
            shares = apportioned(global_batch, self.shares, 0)
        self._kept = {}
        if shares is not None and not drop_slow and wish == "auto" and not all(shares):
            shares = apportioned(global_batch, shares, least)
        if shares != self.shares and shares is not None:
            self._tell(shares, self._progress.step, "")
        self.shares = shares
        self._controller = None
        offers = not self._offered and not _steps_alone(models)
        if wish == "auto" or (wish == "even" and offers and global_batch >= ranks):
            now = shares or even(global_batch, ranks)
            self._controller = Controller(now, least=least, drops=drop_slow, resting=resting)

    def _resting(self) -> dict[int, tuple[int, int]]:
        """Ranks that were dropped before, by a checkpoint or in this process, and rest still."""
        if not self._kept:
            return {} if self._controller is None else self._controller.resting
        if tuple(self._kept.get("hosts", ())) != self._hosts:
            return {}  # other ranks have their numbers
        return {
            int(rank): (int(end), int(long)) for rank, end, long in self._kept.get("resting", ())
        }

    def renew(self, models: Models) -> None:
        """Begins anew in a new group of ranks, with what is known of the hosts; a collective."""
        if not self._global_batch:
            return
        self._kept = self.state_dict()
        self.shares, self._controller, self._hosts = None, None, ()
        self._named.clear()
        self.begin(self._wish, self._drop_slow, self._global_batch, models)

    def fitted(self, found: Sequence[tuple[str, int]]) -> list[int]:
        """Limits of the ranks, from what fits now and what a checkpoint was trained with.

        Pieces decide how gradients are rounded: on the same hosts they stay, unless they are too
        large now.

        Args:
            found: Host and limit (0: none) of each rank.
        """
        before = self._fits if [h for h, _ in self._fits] == [h for h, _ in found] else found
        pairs = zip((n for _, n in before), (n for _, n in found), strict=True)
        limits = [min(filter(None, pair), default=0) for pair in pairs]
        self._fits = [(host, limit) for (host, _), limit in zip(found, limits, strict=True)]
        return limits

    def look(self, look: Look, step: int) -> None:
        """Decides from what the ranks measured; the step is the first with new shares."""
        controller = self._controller
        advice = controller.look(look) if controller else None
        if controller is None or advice is None:
            return
        if self._wish == "even":
            self._offer(advice)
            return
        dropped = advice.useless is not None and not advice.shares[advice.useless]
        if advice.useless is not None and advice.useless not in self._named:
            self._named.add(advice.useless)
            self._name(advice, dropped)
        if advice.act:
            controller.take(advice.shares, step)
            self.shares = advice.shares
            before, after = advice.whole
            least = "" if advice.sure else " at best"
            gain = f" (a step of {before:.3f} s becomes one of {after:.3f} s{least})"
            self._tell(advice.shares, step, "" if dropped or not advice.win else gain)

    # -- what is said --------------------------------------------------------------------

    def _tell(self, shares: Shares, step: int, why: str) -> None:
        text = f"shares of the global batch: {self._said(shares)}{why}"
        self._journal.say(text)
        if self._comms.world.rank == 0:
            self._journal.event("shares", step=step, shares=list(shares), why=text)
        hosts: dict[str, float] = {}
        for host, share in zip(self._hosts, shares, strict=True):
            hosts[host] = hosts.get(host, 0) + share
        self._journal.record("shares", hosts)
        if not all(shares):
            self._progress.some_absent = True  # for every meter

    def _said(self, shares: Sequence[int]) -> str:
        """By host, in their order; at most a dozen."""
        by_host: dict[str, list[int]] = {}
        for host, share in zip(self._hosts, shares, strict=True):
            by_host.setdefault(host, []).append(share)
        parts = [f"{host} {'+'.join(map(str, some))}" for host, some in by_host.items()]
        more = f" and {len(parts) - 12} more hosts" if len(parts) > 12 else ""
        return ", ".join(parts[:12]) + more

    def _offer(self, advice: Advice) -> None:
        """With even shares: what others would win, once."""
        worth = advice.win >= OFFERED and advice.now - advice.then >= OFFERED_S
        self._offers = self._offers + 1 if worth else 0
        if self._offers < 2:
            return
        self._offered, self._controller = True, None
        before, after = advice.whole
        shares = advice.shares
        fast, slow = (
            self._hosts[shares.index(one)] for one in (max(shares), min(filter(None, shares)))
        )
        what = f"{fast} is faster than {slow}" if fast != slow else "some ranks are faster"
        self._journal.say(
            f"{what}. Giving {self._said(shares)} of the {sum(shares)} samples of a batch could"
            f" shorten a step from {format_duration(before)} to {format_duration(after)}:"
            ' session.loader(…, balance="auto"), or --balance auto of a recipe'
        )

    def _name(self, advice: Advice, dropped: bool) -> None:
        """A rank without which the job would be faster."""
        assert advice.useless is not None
        who = self._called[advice.useless]
        with_it, without = advice.whole[1], advice.without + advice.moving
        what = "--drop-slow gives it nothing to do; better leave it out of the job"
        if dropped:
            what = "it gets nothing to do (--drop-slow)"
        elif advice.useless == 0:
            what = "rank 0 is never dropped: name another host first (-H), or leave its host out"
        text = (
            f"{who} makes the job slower: a step takes {with_it:.3f} s with it, {without:.3f} s"
            f" without, as its smallest share already takes that long; {what}"
        )
        if self._comms.world.rank == 0:
            self._journal.tell("slow rank", warning=text)

    # -- in checkpoints ------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Nothing of shares while they are even and stay so."""
        fits = {"fits": [[*one] for one in self._fits]} if self._fits else {}
        if self.shares is None or self._wish == "even":
            return fits
        one = self._controller
        return {
            **fits,
            "shares": list(self.shares),
            "hosts": list(self._hosts),
            "speeds": one.speeds() if one else [],
            "resting": [[rank, *rest] for rank, rest in one.resting.items()] if one else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept = state
        self._fits = [(str(host), int(limit)) for host, limit in state.get("fits", ())]


def _typed(wish: Wish) -> str:
    if isinstance(wish, str):
        return wish
    return ",".join(f"{host}={weight:g}" for host, weight in wish.items())


def _are_weights(wish: object) -> bool:
    """Whether these are numbers by host, whatever their values."""
    if not isinstance(wish, Mapping) or not all(isinstance(host, str) for host in wish):
        return False
    numbers = [one for one in wish.values() if isinstance(one, (int, float))]
    most = balance.MAX_WEIGHT
    return len(numbers) == len(wish) and not any(most < one < math.inf for one in numbers)


def _steps_alone(models: Models) -> bool:
    return any(one.communication and one.communication.requested.name == "local" for one in models)


def _refuse(models: Models, wish: Wish, drop_slow: bool) -> None:
    way = "local" if _steps_alone(models) else "exact"
    sharded = parallel.is_sharded(models.module)
    balance.validate(_typed(wish), sharded=sharded, communication=way)
    if wish != "auto":
        return
    names = [name for name in models.figures("loss") if name != ALONE]
    unused = any(getattr(one.model, "find_unused_parameters", False) for one in models)
    if drop_slow and (names or unused):
        raise SettingError(
            "--drop-slow needs a single model whose parameters are all used in each step",
            found=f"models {', '.join(names)}" if names else "unused=True was given",
            remedy="leave drop_slow out: the slowest rank then keeps one sample",
        )


def needs_two(module: nn.Module) -> bool:
    """Whether a model may be unable to train on one sample, as it takes statistics of a batch."""
    norms = (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm)
    return any(isinstance(one, norms) for one in module.modules())
