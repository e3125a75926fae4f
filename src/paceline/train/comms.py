"""What ranks tell each other, apart from gradients. A world of one needs no process group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.spec import errors
from paceline.spec.errors import JobError, PacelineError
from paceline.train.world import World

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Comms:
    """Collectives that every rank must call in the same order.

    Attributes:
        world: Place of this process.
        device: Device whose tensors the backend moves.
        group: Process group; ``None`` is that of the whole job.
    """

    world: World
    device: torch.device
    group: dist.ProcessGroup | None = None

    @property
    def alone(self) -> bool:
        return self.world.size == 1

    def sum(self, vector: Tensor) -> Tensor:
        """The element-wise sum over all ranks; the same bits on every rank."""
        if not self.alone:
            dist.all_reduce(vector, group=self.group)
        return vector

    def most(self, vector: Tensor) -> list[float]:
        """The element-wise maximum over all ranks."""
        if self.alone:
            return [float(one) for one in vector]
        mine = vector.to(self.device)
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=self.group)
        return [float(one) for one in mine.cpu()]

    def rows(self, vector: Tensor) -> Tensor:
        """Every rank's vector, on the CPU, shape ``[ranks, n]``."""
        if self.alone:
            return vector.cpu()[None]
        mine = vector.to(self.device)
        all_rows = [torch.empty_like(mine) for _ in range(self.world.size)]
        dist.all_gather(all_rows, mine, group=self.group)
        return torch.stack(all_rows).cpu()

    def texts(self, text: str) -> list[str]:
        """Every rank's text, in rank order: torch's ``all_gather_object`` without its pickle."""
        content = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
        lengths = self.rows(torch.tensor([len(content)]))[:, 0]
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        padded[: len(content)] = content
        rows = self.rows(padded)
        return [
            bytes(row[: length - 1].tolist()).decode()
            for row, length in zip(rows, lengths.tolist(), strict=True)
        ]

    def barrier(self) -> None:
        """Waits until every rank is here."""
        self.rows(torch.zeros(1))

    def agree(self, what: str, value: str) -> None:
        """Raises on every rank when ``value`` is not the same everywhere.

        Raises:
            JobError: Names a rank that differs from rank 0, and both values.
        """
        values = self.texts(f"{self.world.host}\0{value}")
        first = values[0].split("\0", 1)
        for rank, (host, other) in enumerate(one.split("\0", 1) for one in values):
            if other != first[1]:
                raise JobError(
                    f"{what} must be the same on every rank",
                    found=f"rank 0 on {first[0]}: {first[1]}\nrank {rank} on {host}: {other}",
                    remedy="give every node the same files and the same options",
                )

    def together(self, act: Callable[[], T]) -> T:
        """Acts on every rank; when one fails with a handled error, every rank raises it.

        So no rank waits for another that has already given up.
        """
        result: T | None = None
        problem = ""
        try:
            result = act()
        except PacelineError as error:
            problem = "\0".join(
                (type(error).__name__, error.message, error.found, error.remedy, self.world.host)
            )
        for rank, text in enumerate(self.texts(problem)):
            if text:
                raise _rebuilt(rank, *text.split("\0"))
        return result  # type: ignore[return-value]


def _rebuilt(
    rank: int, kind: str, message: str, found: str, remedy: str, host: str
) -> PacelineError:
    where = f"rank {rank} on {host}"
    error: type[PacelineError] = getattr(errors, kind, JobError)
    rebuilt = error(message, found=f"{found}\n({where})" if found else where, remedy=remedy)
    rebuilt.origin_rank = rank
    return rebuilt
