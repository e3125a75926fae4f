"""The gradient reducers, by the name that a user gives."""

from __future__ import annotations

from paceline.train.reduce.coded_reducer import Bf16, Fp16, Int4, Int8
from paceline.train.reduce.exact import Exact
from paceline.train.reduce.local import Local
from paceline.train.reduce.reducer import GradientReducer

REDUCERS: dict[str, type[GradientReducer]] = {
    reducer.name: reducer for reducer in (Exact, Fp16, Bf16, Int8, Int4, Local)
}
