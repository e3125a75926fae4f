"""Half the bytes, and nothing that a training shows."""

from __future__ import annotations

from typing import ClassVar

from paceline.train.reduce import codecs
from paceline.train.reduce.codecs import Code
from paceline.train.reduce.coded_reducer import Coded


class Fp16(Coded):
    """float16 with a scale for each block: eleven bits of every number, whatever its size."""

    name: ClassVar[str] = "fp16"
    up: ClassVar[Code] = codecs.FP16
    down: ClassVar[Code] = codecs.FP16
    feedback: ClassVar[bool] = False
