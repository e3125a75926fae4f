"""A quarter of the bytes."""

from __future__ import annotations

from typing import ClassVar

from paceline.train.communication import codes
from paceline.train.communication.coded import Coded
from paceline.train.communication.codes import Code


class Int8(Coded):
    """8 bits both ways, with a scale for each block and error feedback."""

    name: ClassVar[str] = "int8"
    up: ClassVar[Code] = codes.INT8
    down: ClassVar[Code] = codes.INT8
