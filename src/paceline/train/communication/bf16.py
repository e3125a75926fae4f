"""Half the bytes, with eight bits of every number."""

from __future__ import annotations

from typing import ClassVar

from paceline.train.communication import codes
from paceline.train.communication.coded import Coded
from paceline.train.communication.codes import Code


class Bf16(Coded):
    """bfloat16 with what it leaves out said in the next step."""

    name: ClassVar[str] = "bf16"
    up: ClassVar[Code] = codes.BF16
    down: ClassVar[Code] = codes.BF16
