"""The mean of gradients as it is: DDP's own arithmetic, to the bit, but for little models."""

from __future__ import annotations

from typing import Any, ClassVar

from paceline.train.reduce.collectives import Wire
from paceline.train.reduce.exchange import Bucket, Line, Method


class Exact:
    """An all-reduce of each bucket, divided first as DDP divides.

    Args:
        line: What is sent over.
        wire: On that line.
        little: The whole model's gradients are little (``reduce/small_messages.py``). Not a single
            bucket's, for the sum must not depend on how gradients are divided.
        directly: Two ranks send each other all they have by connections of their own
            (``reduce/direct.py``): as many bytes as by gloo, and of two numbers there is
            one sum.
    """

    name: ClassVar[str] = "exact"

    def __init__(
        self, line: Line, wire: Wire | None = None, *, little: bool = False, directly: bool = False
    ) -> None:
        self._wire, self._width = wire or Wire(line), line.width
        self._little, self._of_two = little, directly and line.ranks == 2

    def average(self, bucket: Bucket) -> None:
        if self._of_two:
            self._wire.mean_of_two(bucket.flat)
            return
        bucket.flat.mul_(1.0 / self._wire.ranks)
        (self._wire.sum if self._little else self._wire.around)(bucket.flat)

    def counted(self) -> None:
        pass

    def void(self) -> None:
        pass

    def follow(self, other: Method) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        pass

    def alike(self) -> dict[str, Any]:
        return {}

    def take_alike(self, state: dict[str, Any]) -> None:
        pass

    def sent(self, elements: int, ranks: int) -> int:
        return int(2 * (ranks - 1) * self._width * elements / ranks)
