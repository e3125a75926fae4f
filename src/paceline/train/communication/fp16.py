"""Half the bytes, and nothing that a training shows."""

from __future__ import annotations

from typing import ClassVar

from paceline.train.communication import codes
from paceline.train.communication.coded import Coded
from paceline.train.communication.codes import Code


class Fp16(Coded):
    """float16 with a scale for each block: eleven bits of every number, whatever its size."""

    name: ClassVar[str] = "fp16"
    up: ClassVar[Code] = codes.FP16
    down: ClassVar[Code] = codes.FP16
    feedback: ClassVar[bool] = False
