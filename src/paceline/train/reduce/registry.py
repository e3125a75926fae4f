"""The methods of averaging gradients, by name.

Attributes:
    METHODS: By the name that a user gives.
"""

from __future__ import annotations

from typing import Protocol

from paceline.train.reduce.bf16 import Bf16
from paceline.train.reduce.collectives import Wire
from paceline.train.reduce.exact import Exact
from paceline.train.reduce.exchange import Line, Method
from paceline.train.reduce.fp16 import Fp16
from paceline.train.reduce.int4 import Int4
from paceline.train.reduce.int8 import Int8
from paceline.train.reduce.local import Local


class Maker(Protocol):
    """Makes a method for a line, by a wire of one's own in tests."""

    def __call__(self, line: Line, wire: Wire | None = None) -> Method: ...


METHODS: dict[str, Maker] = {one.name: one for one in (Exact, Fp16, Bf16, Int8, Int4, Local)}
