"""A fifth of the bytes; an eighth between two ranks."""

from __future__ import annotations

from typing import ClassVar

from paceline.train.communication import codes
from paceline.train.communication.coded import Coded
from paceline.train.communication.codes import Code


class Int4(Coded):
    """4 bits of a rank's own gradients and 8 of their means, with error feedback."""

    name: ClassVar[str] = "int4"
    up: ClassVar[Code] = codes.INT4
    down: ClassVar[Code] = codes.INT8
