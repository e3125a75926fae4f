"""The learning rate range test: the loss while the rate rises from step to step.

L. N. Smith, Cyclical Learning Rates for Training Neural Networks, 2015 (arXiv:1506.01186). Where
the loss falls fast the rate is good; where it begins to rise again the rate is too high.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.spec.errors import SettingError
from paceline.train import files
from paceline.train.data.loader import Batch, Loader
from paceline.train.measure.trial import restored_afterwards, trial_batches
from paceline.train.update import loss_of, per_sample_losses

if TYPE_CHECKING:
    from paceline.train.session import Session

TABLE, PICTURE = "lr-range.csv", "lr-range.svg"
LOWEST, HIGHEST = 1e-7, 10.0
_HOPELESS = 1.0  # of the first loss: a rise after which nothing comes back
_NOISE, _SMALL = 4.0, 0.01  # of a smoothed loss's spread, of the first loss: a fall that is none

Compute = Callable[[Batch], Tensor]
"""The forward pass of a batch: its losses, as ``session.step`` takes them."""


@dataclass(frozen=True)
class LrRange:
    """What the test has found.

    Attributes:
        rates: Learning rate of each step, rising.
        losses: Mean loss of each step's batch, before the step.
        STEPS: Of a test, where nothing else is said.
    """

    STEPS: ClassVar = 100

    rates: Sequence[float]
    losses: Sequence[float]

    @property
    def first(self) -> float:
        """The loss before it changes: the median of the first tenth of the steps."""
        return float(np.median(self.losses[: max(3, len(self.losses) // 10)]))

    @property
    def smoothed(self) -> list[float]:
        """Each loss averaged with its neighbours; those that have exploded count as twice the
        first ones."""
        clipped, radius = self._clipped, self._radius
        parts = (clipped[max(0, at - radius) : at + radius + 1] for at in range(len(clipped)))
        return [float(part.mean()) for part in parts]

    @property
    def _clipped(self) -> NDArray[np.float64]:
        return np.minimum(self.losses, 2 * abs(self.first))

    @property
    def _radius(self) -> int:
        return max(1, len(self.losses) // 20)

    @property
    def lowest(self) -> float:
        """The rate with the lowest smoothed loss."""
        return self.rates[int(np.argmin(self.smoothed))]

    @property
    def suggestion(self) -> float | None:
        """The rate at which half of the fall of the loss is done, nearly where it falls fastest
        (a slope would follow the noise); ``None`` where it does not fall."""
        smoothed = np.array(self.smoothed)
        end = int(smoothed.argmin())
        noise = float(np.std((self._clipped - smoothed)[: end + 1])) / math.sqrt(2 * self._radius)
        if not self.first - smoothed[end] > max(_NOISE * noise, _SMALL * abs(self.first)):
            return None
        above_half = np.flatnonzero(smoothed[: end + 1] > (self.first + smoothed[end]) / 2)
        return self.rates[min(int(above_half.max(initial=-1)) + 1, end)]

    def __str__(self) -> str:
        if self.suggestion is None:
            return (
                f"no learning rate from {self.rates[0]:.2g} to {self.rates[-1]:.2g} lowered the"
                f" loss clearly in {len(self.rates)} steps: try more (--steps 500)"
            )
        return (
            f"suggested: --lr {self.suggestion:.2g} (there half of the loss's fall is done; it is"
            f" lowest at {self.lowest:.2g}, and the test ended at {self.rates[-1]:.2g})"
        )


def find_lr(
    session: Session,
    loader: Loader,
    compute: Compute,
    *,
    lowest: float = LOWEST,
    highest: float = HIGHEST,
    steps: int = LrRange.STEPS,
) -> LrRange:
    """Trains for some steps with a rising rate and puts everything back.

    To be called after ``session.prepare`` and before ``session.epochs``. The table and the picture
    are in the run directory.

    Args:
        session: With a single model.
        lowest, highest: Rates of the first and the last step; it ends earlier when the loss is
            hopeless.

    Raises:
        SettingError: Rates or steps that cannot be.
    """
    if not 0 < lowest < highest < math.inf or steps < 3:
        raise SettingError(
            f"a learning rate test from {lowest:g} to {highest:g} in {steps} steps cannot be",
            remedy=f"rates above 0, the lower first, as {LOWEST:g} to {HIGHEST:g}; 3 steps or more",
        )
    planned = np.geomspace(lowest, highest, steps).tolist()
    rates: list[float] = []
    losses: list[float] = []
    with (
        restored_afterwards(session.models, session.device, session.precision) as updater,
        closing(trial_batches(loader, steps)) as batches,
    ):
        groups = updater.optimizer.param_groups
        bases = [group.get("initial_lr", group["lr"]) for group in groups]
        total = torch.zeros((), dtype=torch.float64, device=session.device)
        for batch in batches:
            session.phase("find the learning rate")
            sample_losses = per_sample_losses(compute(batch), len(batch.ids))
            total += sample_losses.detach()[: batch.count].double().sum()
            updater.backward(loss_of(sample_losses, batch, session.world.size))
            if not batch.last:
                continue
            rates.append(planned[len(rates)])
            losses.append(float(session.comms.sum(total.clone()[None])) / batch.total)
            total.zero_()
            if _hopeless(losses):
                break
            for group, base in zip(groups, bases, strict=True):
                group["lr"] = rates[-1] * base / bases[0]  # groups keep their relation
            updater.update()
    end = len(losses) - (not math.isfinite(losses[-1]))
    result = LrRange(rates[:end], losses[:end])
    if session.world.rank == 0:
        write(session.folder, result)
    return result


def _hopeless(losses: Sequence[float]) -> bool:
    """Whether the loss is not finite, or has been far above its beginning for three steps."""
    if not math.isfinite(losses[-1]):
        return True
    first = LrRange([], losses).first
    return len(losses) > 3 and min(losses[-3:]) > first + _HOPELESS * abs(first)


def write(folder: Path, result: LrRange) -> None:
    rows = zip(result.rates, result.losses, result.smoothed, strict=True)
    lines = [
        "lr,loss,smoothed",
        *(f"{r:.6g},{loss:.6g},{smoothed:.6g}" for r, loss, smoothed in rows),
    ]
    files.write_bytes(folder / TABLE, ("\n".join(lines) + "\n").encode())
    files.write_bytes(folder / PICTURE, _draw(result).encode())


def _draw(result: LrRange) -> str:
    """Returns the curve of the losses over the learning rates as SVG."""
    width, height, margin, bottom = 640, 360, 60, 40
    decades = np.log10(np.array(result.rates))
    lowest, highest = float(decades[0]), float(decades[-1])
    low, high = min(result.losses), max(result.smoothed)

    def place(rate: float, loss: float) -> str:
        x = margin + (width - margin - 20) * (math.log10(rate) - lowest) / max(
            highest - lowest, 1e-9
        )
        y = 30 + (height - bottom - 30) * (high - min(loss, high)) / max(high - low, 1e-9)
        return f"{x:.1f},{y:.1f}"

    def line(losses: Sequence[float], colour: str) -> str:
        points = " ".join(place(*pair) for pair in zip(result.rates, losses, strict=True))
        return f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"/>'

    marks = []
    for decade in range(math.ceil(lowest), math.floor(highest) + 1):
        x = place(10.0**decade, low).split(",")[0]
        marks.append(f'<text x="{x}" y="{height - 15}" text-anchor="middle">1e{decade}</text>')
    if result.suggestion is not None:
        x = place(result.suggestion, low).split(",")[0]
        marks.append(f'<line x1="{x}" x2="{x}" y1="30" y2="{height - bottom}" stroke="green"/>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
            ' font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="{margin}" y="18">loss over the learning rate ({result})</text>',
            f'<text x="8" y="36">{high:.3g}</text>',
            f'<text x="8" y="{height - bottom}">{low:.3g}</text>',
            line(result.losses, "#ccc"),
            line(result.smoothed, "#06c"),
            *marks,
            "</svg>",
            "",
        ]
    )
