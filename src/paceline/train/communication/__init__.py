"""Ways of averaging gradients over all ranks: one file each.

Attributes:
    METHODS: By the name that a user gives.
"""

from __future__ import annotations

from typing import Protocol

from paceline.train.communication.bf16 import Bf16
from paceline.train.communication.exact import Exact
from paceline.train.communication.fp16 import Fp16
from paceline.train.communication.int4 import Int4
from paceline.train.communication.int8 import Int8
from paceline.train.communication.local import Local
from paceline.train.communication.wire import Wire
from paceline.train.exchange import Line, Method


class Maker(Protocol):
    """Makes a method for a line, by a wire of one's own in tests."""

    def __call__(self, line: Line, wire: Wire | None = None) -> Method: ...


METHODS: dict[str, Maker] = {one.name: one for one in (Exact, Fp16, Bf16, Int8, Int4, Local)}
