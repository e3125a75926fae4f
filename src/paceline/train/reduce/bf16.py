"""Half the bytes, with eight bits of every number."""

from __future__ import annotations

from typing import ClassVar

from paceline.train.reduce import codecs
from paceline.train.reduce.codecs import Code
from paceline.train.reduce.coded_reducer import Coded


class Bf16(Coded):
    """bfloat16 with what it leaves out said in the next step."""

    name: ClassVar[str] = "bf16"
    up: ClassVar[Code] = codecs.BF16
    down: ClassVar[Code] = codecs.BF16
