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
    MIN_SUGGESTED_GAIN,
    MIN_SUGGESTED_GAIN_S,
    Advice,
    Controller,
    Shares,
    apportion,
    even_shares,
    resumed_shares,
    shares_by_host,
)
from paceline.train.data.loader import Progress
from paceline.train.journal import Journal
from paceline.train.measure.pace import StepTimings
from paceline.train.models import UNNAMED, Models

BalanceMode = Literal["auto", "even"] | Mapping[str, float]
"""By the ranks' speeds, all alike, or by a weight for each host."""

MAX_TIMING_STEPS = 8
"""Most steps between two looks where shares follow the speeds."""
_MIN_NORM_SAMPLES = 4  # samples from which batch normalisation makes its statistics, at least


def parse_balance(balance_option: str | Mapping[str, float]) -> BalanceMode:
    """Parses the script's balance option. SettingError if it is invalid."""
    if not isinstance(balance_option, str):
        return balance_option
    try:
        return balance.parse_weights(balance_option)
    except SettingError as error:
        raise SettingError(
            f"balance={balance_option!r} is not valid",
            found=error.found,
            remedy='balance="auto", "even", or a weight for each host: "n1=3,n2=1"',
        ) from None


class BatchDivision:
    """Divides global batches among ranks. Every rank has one and calls it in the same order.

    Its state belongs to the checkpoint: a resumed run begins with the shares that it had.

    Args:
        journal: Where changes are recorded and said.
        progress: Of the session; says whether there are ranks without a share.

    Attributes:
        shares: Samples of each rank in a whole global batch; ``None`` while they are even.
    """

    def __init__(self, comms: Comms, journal: Journal, progress: Progress) -> None:
        self._comms, self._journal, self._progress = comms, journal, progress
        self._mode: BalanceMode = "even"
        self._controller: Controller | None = None
        self._hosts: tuple[str, ...] = ()
        self._rank_names: list[str] = []  # the ranks
        self._saved_state: Mapping[str, Any] = {}  # of a checkpoint, until the training begins
        self._global_batch, self._drop_slow = 0, False
        self._num_suggestions = 0  # looks in a row that saw something to win
        self._has_suggested = False
        self._reported: set[int] = set()
        # host and limit of each rank, found by trying
        self._memory_fits: list[tuple[str, int]] = []
        self.shares: Shares | None = None

    @property
    def is_adaptive(self) -> bool:
        """Whether shares may change while training."""
        return self._mode == "auto"

    @property
    def has_idle_rank(self) -> bool:
        """Whether some rank has nothing to compute."""
        return self.shares is not None and not all(self.shares)

    def check(self, mode: BalanceMode, drop_slow: bool, global_batch: int) -> None:
        """Refuses invalid settings; a collective for weights of hosts.

        Raises SettingError.
        """
        if mode not in ("auto", "even") if isinstance(mode, str) else not _is_weight_mapping(mode):
            raise SettingError(
                f"balance={mode!r} is not valid",
                remedy='balance="auto", "even", or a weight for each host: {"n1": 3, "n2": 1}',
            )
        balance.validate(_format_balance(mode), drop_slow=drop_slow)
        ranks = self._comms.world.size
        if mode != "even" and global_batch < ranks:
            raise SettingError(
                f"--global-batch {global_batch} cannot be shared unevenly among {ranks} processes",
                found="there are fewer samples in a step than processes",
                remedy=f"--global-batch {8 * ranks}, or --balance even",
            )
        if not isinstance(mode, str):
            present_hosts = self._comms.texts(self._comms.world.host)
            balance.validate_weights(mode, self._comms.world.hosts or present_hosts)

    def start(self, mode: BalanceMode, drop_slow: bool, global_batch: int, models: Models) -> None:
        """Sets the shares with which the training begins.

        Raises SettingError if the models cannot be trained so. With ``drop_slow``, a rank without
        which steps would be faster gets nothing.
        """
        ranks, former_mode, self._mode = self._comms.world.size, self._mode, mode
        self._global_batch, self._drop_slow = global_batch, drop_slow
        if self._comms.is_alone:
            return
        if mode != "even":
            _check_models(models, mode, drop_slow)
        if not self._hosts:
            self._rank_names = self._comms.texts(self._comms.rank_name)
            self._hosts = tuple(name.partition(" on ")[2] for name in self._rank_names)
        min_samples = _MIN_NORM_SAMPLES if has_batch_norm(models.module) else 1
        min_share = min(min_samples, max(1, global_batch // ranks))
        rest_periods = self._rest_periods()
        shares: Shares | None = None
        if not isinstance(mode, str):
            shares = shares_by_host(mode, self._hosts, global_batch, min_share)
        elif mode == "auto" and self._saved_state:
            shares = resumed_shares(self._saved_state, self._hosts, global_batch, min_share)
        elif mode == "auto" == former_mode and self.shares is not None:
            shares = apportion(global_batch, self.shares, 0)
        self._saved_state = {}
        if shares is not None and not drop_slow and mode == "auto" and not all(shares):
            shares = apportion(global_batch, shares, min_share)
        if shares != self.shares and shares is not None:
            self._announce(shares, self._progress.step, "")
        self.shares = shares
        self._controller = None
        may_suggest = not self._has_suggested and not _is_local(models)
        if mode == "auto" or (mode == "even" and may_suggest and global_batch >= ranks):
            initial_shares = shares or even_shares(global_batch, ranks)
            self._controller = Controller(
                initial_shares, min_share=min_share, drop_slow=drop_slow, rest_periods=rest_periods
            )

    def _rest_periods(self) -> dict[int, tuple[int, int]]:
        """Returns, by dropped rank, the step at which it is tried again and its steps of rest."""
        if not self._saved_state:
            return {} if self._controller is None else self._controller.rest_periods
        if tuple(self._saved_state.get("hosts", ())) != self._hosts:
            return {}  # other ranks have their numbers
        return {
            int(rank): (int(end), int(num_steps))
            for rank, end, num_steps in self._saved_state.get("resting", ())
        }

    def regroup(self, models: Models) -> None:
        """Starts again in a new group of ranks, with known speeds of hosts; a collective."""
        if not self._global_batch:
            return
        self._saved_state = self.state_dict()
        self.shares, self._controller, self._hosts = None, None, ()
        self._reported.clear()
        self.start(self._mode, self._drop_slow, self._global_batch, models)

    def resolve_limits(self, fits: Sequence[tuple[str, int]]) -> list[int]:
        """Returns limits of the ranks, from what fits now and what a checkpoint was trained with.

        Pieces decide how gradients are rounded: on the same hosts they stay, unless they are too
        large now.

        Args:
            fits: Host and limit (0: none) of each rank.
        """
        hosts, limits = [host for host, _ in fits], [limit for _, limit in fits]
        if hosts == [host for host, _ in self._memory_fits]:
            former = [limit for _, limit in self._memory_fits]
            limits = [
                min(filter(None, pair), default=0) for pair in zip(limits, former, strict=True)
            ]
        self._memory_fits = list(zip(hosts, limits, strict=True))
        return limits

    def update(self, timings: StepTimings, step: int) -> None:
        """Updates shares from timings; ``step`` is the first with new shares."""
        controller = self._controller
        advice = controller.observe(timings) if controller else None
        if controller is None or advice is None:
            return
        if self._mode == "even":
            self._suggest_balance(advice)
            return
        dropped = advice.surplus_rank is not None and not advice.shares[advice.surplus_rank]
        if advice.surplus_rank is not None and advice.surplus_rank not in self._reported:
            self._report_surplus_rank(advice, dropped)
        if advice.apply:
            controller.apply(advice.shares, step)
            self.shares = advice.shares
            current_s, proposed_s = advice.step_seconds
            bound = "" if advice.is_certain else " at best"
            gain = f" (a step of {current_s:.3f} s becomes one of {proposed_s:.3f} s{bound})"
            self._announce(advice.shares, step, "" if dropped or not advice.gain else gain)

    # -- what is said --------------------------------------------------------------------

    def _announce(self, shares: Shares, step: int, reason: str) -> None:
        text = f"shares of the global batch: {self._format_shares(shares)}{reason}"
        self._journal.print(text)
        if self._comms.world.rank == 0:
            self._journal.event("shares", step=step, shares=list(shares), why=text)
        hosts: dict[str, float] = {}
        for host, share in zip(self._hosts, shares, strict=True):
            hosts[host] = hosts.get(host, 0) + share
        self._journal.record("shares", hosts)
        if not all(shares):
            self._progress.some_absent = True  # for every meter

    def _format_shares(self, shares: Sequence[int]) -> str:
        """Formats shares by host in rank order, at most a dozen."""
        by_host: dict[str, list[int]] = {}
        for host, share in zip(self._hosts, shares, strict=True):
            by_host.setdefault(host, []).append(share)
        parts = [f"{host} {'+'.join(map(str, sizes))}" for host, sizes in by_host.items()]
        omitted = f" and {len(parts) - 12} more hosts" if len(parts) > 12 else ""
        return ", ".join(parts[:12]) + omitted

    def _suggest_balance(self, advice: Advice) -> None:
        """With even shares, says once what others would gain."""
        is_worthwhile = (
            advice.gain >= MIN_SUGGESTED_GAIN
            and advice.current_s - advice.proposed_s >= MIN_SUGGESTED_GAIN_S
        )
        self._num_suggestions = self._num_suggestions + 1 if is_worthwhile else 0
        if self._num_suggestions < 2:
            return
        self._has_suggested, self._controller = True, None
        current_s, proposed_s = advice.step_seconds
        shares = advice.shares
        faster = self._hosts[shares.index(max(shares))]
        slower = self._hosts[shares.index(min(filter(None, shares)))]
        comparison = f"{faster} is faster than {slower}"
        if faster == slower:
            comparison = "some ranks are faster"
        self._journal.print(
            f"{comparison}. Giving {self._format_shares(shares)} of the {sum(shares)} samples of a"
            f" batch could shorten a step from {format_duration(current_s)} to"
            f" {format_duration(proposed_s)}:"
            ' session.loader(…, balance="auto"), or --balance auto of a recipe'
        )

    def _report_surplus_rank(self, advice: Advice, dropped: bool) -> None:
        """Reports a rank without which the job would be faster."""
        assert advice.surplus_rank is not None
        name = self._rank_names[advice.surplus_rank]
        with_s, without_s = advice.step_seconds[1], advice.reduced_s + advice.moving_s
        if with_s - without_s < MIN_SUGGESTED_GAIN_S and not dropped:
            return
        self._reported.add(advice.surplus_rank)
        consequence = "--drop-slow gives it nothing to do; better leave it out of the job"
        if dropped:
            consequence = "it gets nothing to do (--drop-slow)"
        elif advice.surplus_rank == 0:
            consequence = (
                "rank 0 is never dropped: name another host first (-H), or leave its host out"
            )
        text = (
            f"{name} makes the job slower: a step takes {with_s:.3f} s with it, {without_s:.3f} s"
            f" without, as its smallest share already takes that long; {consequence}"
        )
        if self._comms.world.rank == 0:
            self._journal.report("slow rank", warning=text)

    # -- in checkpoints ------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the state; without shares while they are even and stay so."""
        fits = {"fits": [[*fit] for fit in self._memory_fits]} if self._memory_fits else {}
        if self.shares is None or self._mode == "even":
            return fits
        controller = self._controller
        rest_periods = controller.rest_periods if controller else {}
        return {
            **fits,
            "shares": list(self.shares),
            "hosts": list(self._hosts),
            "speeds": controller.speeds() if controller else [],
            "resting": [[rank, *drop] for rank, drop in rest_periods.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved_state = state
        self._memory_fits = [(str(host), int(limit)) for host, limit in state.get("fits", ())]


def _format_balance(mode: BalanceMode) -> str:
    return mode if isinstance(mode, str) else balance.format_weights(mode)


def _is_weight_mapping(value: object) -> bool:
    """Whether these are numbers by host, whatever their values."""
    if not isinstance(value, Mapping) or not all(isinstance(host, str) for host in value):
        return False
    numbers = [number for number in value.values() if isinstance(number, (int, float))]
    max_weight = balance.MAX_WEIGHT
    return len(numbers) == len(value) and not any(
        max_weight < number < math.inf for number in numbers
    )


def _is_local(models: Models) -> bool:
    return any(
        updater.communication and updater.communication.requested.name == "local"
        for updater in models
    )


def _check_models(models: Models, mode: BalanceMode, drop_slow: bool) -> None:
    method = "local" if _is_local(models) else "exact"
    sharded = parallel.is_sharded(models.module)
    balance.validate(_format_balance(mode), sharded=sharded, communication=method)
    if mode != "auto":
        return
    names = [name for name in models.metric_names("loss") if name != UNNAMED]
    unused = any(getattr(updater.model, "find_unused_parameters", False) for updater in models)
    if drop_slow and (names or unused):
        raise SettingError(
            "--drop-slow needs a single model whose parameters are all used in each step",
            found=f"models {', '.join(names)}" if names else "unused=True was given",
            remedy="leave drop_slow out: the slowest rank then keeps one sample",
        )


def has_batch_norm(module: nn.Module) -> bool:
    """Whether a model computes statistics of a batch, which one sample may not allow."""
    norms = (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm)
    return any(isinstance(part, norms) for part in module.modules())
