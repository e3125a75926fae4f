"""How a recipe's ``main`` ends."""

from __future__ import annotations

import sys
from collections.abc import Callable

from paceline.spec.errors import PacelineError


def guarded(body: Callable[[], int | None]) -> int:
    """Runs ``body``; a handled error is printed without a traceback and gives its exit status."""
    try:
        return body() or 0
    except PacelineError as error:
        print(error.render(), file=sys.stderr, flush=True)
        return error.exit_code
