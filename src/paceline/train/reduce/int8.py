"""A quarter of the bytes."""

from __future__ import annotations

from typing import ClassVar

from paceline.train.reduce import codecs
from paceline.train.reduce.codecs import Code
from paceline.train.reduce.coded_reducer import Coded


class Int8(Coded):
    """8 bits both ways, with a scale for each block and error feedback."""

    name: ClassVar[str] = "int8"
    up: ClassVar[Code] = codecs.INT8
    down: ClassVar[Code] = codecs.INT8
