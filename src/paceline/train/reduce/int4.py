"""A fifth of the bytes; an eighth between two ranks."""

from __future__ import annotations

from typing import ClassVar

from paceline.train.reduce import codecs
from paceline.train.reduce.codecs import Code
from paceline.train.reduce.coded_reducer import Coded


class Int4(Coded):
    """4 bits of a rank's own gradients and 8 of their means, with error feedback."""

    name: ClassVar[str] = "int4"
    up: ClassVar[Code] = codecs.INT4
    down: ClassVar[Code] = codecs.INT8
