"""Exact means over samples that are spread over ranks, and the best of them so far."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.spec.schema import list_of, text, tuple_of
from paceline.train.comms import parse_texts

# all names of a rank, and those not given for all samples
_NAMES = tuple_of(list_of(text()), list_of(text()))

Reduce = Callable[[Tensor], Tensor]
"""Sums a float64 vector over all ranks."""


@dataclass(frozen=True, slots=True)
class Means:
    """Sample-weighted means.

    Attributes:
        count: Samples seen, over all ranks, each once.
        sums: Sum of each value over these samples.
        counts: Of values that were not given for all of them: for how many.
    """

    count: int
    sums: dict[str, float]
    counts: dict[str, int] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        if not self.count:
            raise KeyError(f"{name}: no sample was counted")
        return self.sums[name] / self._samples(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.values())

    def keys(self) -> Iterable[str]:
        """Names of the values, so that ``session.log("test", **means)`` works."""
        return self.values().keys()

    def _samples(self, name: str) -> int:
        return self.counts.get(name, self.count if name in self.sums else 0)

    def __add__(self, other: Means) -> Means:
        """Over the samples of both."""
        if not self.count or not other.count:
            return self if self.count else other
        names = sorted(self.sums.keys() | other.sums.keys())
        count = self.count + other.count
        sums = {name: self.sums.get(name, 0.0) + other.sums.get(name, 0.0) for name in names}
        counts = {name: self._samples(name) + other._samples(name) for name in names}
        return Means(count, sums, {name: n for name, n in counts.items() if n != count})

    def values(self) -> dict[str, float]:
        """The mean of every value; empty when no sample was seen."""
        return {name: self[name] for name in self.sums if self._samples(name)}


class Meter:
    """Collects per-sample values on this rank; :meth:`result` reduces them over all ranks.

    Values are kept as they come and are summed in float64 at the end, so that a step costs
    nothing and the sum does not depend on the number of ranks beyond float64 rounding.

    Args:
        reduce: Sums a float64 vector over all ranks; every rank must call :meth:`result`.
        device: Where the sums are made.
        real: From how many samples a batch holds to how many of them count.
        texts: Gives every rank's text; needed where some ranks add nothing.
        some_absent: There may be ranks that add nothing; the same on every rank.
    """

    def __init__(
        self,
        reduce: Reduce,
        device: torch.device,
        real: Callable[[int], int] = lambda count: count,
        texts: Callable[[str], list[str]] = lambda text: [text],
        some_absent: Callable[[], bool] = lambda: False,
    ) -> None:
        self._reduce, self._num_counted, self._texts = reduce, real, texts
        self._has_absent_ranks = some_absent
        self._device = device
        self._values: dict[str, list[Tensor]] = {}
        self._count, self._added = 0, 0
        self._other_samples: set[str] = set()  # values that were given for other samples
        self._marked: tuple[int, int, dict[str, int]] = 0, 0, {}

    @property
    def empty(self) -> bool:
        """True when nothing was added since the last result; the same on every rank."""
        return not self._values and not self._has_absent_ranks()

    def add(self, count: int, **values: Tensor) -> None:
        """Takes the first ``count`` entries of each value.

        Args:
            count: How many samples; ``batch.count``, or the length of the batch. A stand-in, which
                is there so that every rank takes part in every step, never counts.
            values: One number (or bool) for each sample, shape ``[n >= count]``.

        Raises:
            ValueError: A value has not one number for each sample.
        """
        count = self._num_counted(count)
        for name, value in values.items():
            if value.dim() != 1 or len(value) < count:
                raise ValueError(
                    f"meter.add needs one number for each of the {count} samples,"
                    f" but {name} has the shape {list(value.shape)}"
                )
        self._count, self._added = self._count + count, self._added + 1
        for name, value in values.items():
            self._values.setdefault(name, []).append(value.detach()[:count])

    def add_other_samples(self, **values: Tensor) -> None:
        """Takes values of samples that count with the last ``add``, but are not those of it.

        Their means are over as many as there are. Every rank must give the same names.
        """
        self._other_samples.update(values)
        for name, value in values.items():
            self._values.setdefault(name, []).append(value.detach())

    def mark(self) -> None:
        """Marks a state to which :meth:`roll_back` returns."""
        lengths = {name: len(values) for name, values in self._values.items()}
        self._marked = self._count, self._added, lengths

    def roll_back(self) -> None:
        """Discards what was added since the last mark."""
        self._count, self._added, lengths = self._marked
        self._values = {name: self._values[name][:length] for name, length in lengths.items()}

    def result(self, *, some_absent: bool = False) -> Means:
        """Returns the means over all ranks since the last call, the same on every rank.

        Every rank must have added the same names; one without samples adds with a count of 0.

        Args:
            some_absent: There are ranks that have added nothing; the same on every rank.
        """
        order = sorted(self._values)
        num_added = {name: len(values) for name, values in self._values.items()}
        partial = [n for n in order if num_added[n] < self._added or n in self._other_samples]
        if some_absent or self._has_absent_ranks():
            replies = parse_texts(self._texts(json.dumps([order, partial])), _NAMES)
            order, partial = (sorted({name for r in replies for name in r[n]}) for n in (0, 1))
        numbers = [self._count, *map(self._sum, order), *map(self._num_samples, partial)]
        vector = [torch.as_tensor(n, dtype=torch.float64, device=self._device) for n in numbers]
        count, *totals = self._reduce(torch.stack(vector)).tolist()
        self._values, self._count, self._added = {}, 0, 0
        self._other_samples, self._marked = set(), (0, 0, {})
        sums = dict(zip(order, totals[: len(order)], strict=True))
        counts = map(round, totals[len(order) :])
        return Means(round(count), sums, dict(zip(partial, counts, strict=True)))

    def _sum(self, name: str) -> Tensor | float:
        if name not in self._values:
            return 0.0
        return torch.cat(self._values[name]).to(self._device, torch.float64).sum()

    def _num_samples(self, name: str) -> int:
        return sum(map(len, self._values.get(name, ())))


@dataclass
class Best:
    """The best value so far.

    Every rank gives it the same reduced values, so every rank decides the same.

    Attributes:
        higher: True when more is better.
        patience: Evaluations without a better value before it says stop; 0 never does.
        value: The best value; ``None`` before the first.
        step: Global step of the best value.
        stale: Evaluations since then.
        compared: What the training compared with a target last; ``None`` if it has none.
    """

    higher: bool = True
    patience: int = 0
    value: float | None = None
    step: int = 0
    stale: int = 0
    compared: float | None = None

    def update(self, value: float, step: int) -> bool:
        """Adds the value of an evaluation; returns whether it is the best so far."""
        if step == self.step and self.value is not None:  # evaluated again after a resume
            return value == self.value
        sign = 1 if self.higher else -1
        is_improved = self.value is None or sign * value > sign * self.value
        if is_improved:
            self.value, self.step, self.stale = value, step, 0
        else:
            self.stale += 1
        return is_improved

    @property
    def stop(self) -> bool:
        """True when patience has run out."""
        return 0 < self.patience <= self.stale

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes an earlier state; the present patience stays."""
        self.value, self.step, self.stale = state["value"], state["step"], state["stale"]
        self.compared = state.get("compared")
