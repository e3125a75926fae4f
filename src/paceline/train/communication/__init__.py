"""Ways of averaging gradients over all ranks: one file each.

Attributes:
    METHODS: By the name that a user gives.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.train.communication.exact import Exact
from paceline.train.exchange import Line, Method

METHODS: dict[str, Callable[[Line], Method]] = {one.name: one for one in (Exact,)}
