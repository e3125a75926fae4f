"""What all programs of ours in a job share: how they end, and libraries that only options need."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from paceline.spec import jobenv
from paceline.spec.errors import PacelineError, SettingError


def guarded(body: Callable[[], int | None]) -> int:
    """Runs ``body``; a handled error is printed without a traceback and gives its exit status.

    Under the launcher it is told what failed and says it once, for all ranks; what is printed here
    is for this rank's log. Elsewhere an error that all ranks raise alike is printed by one of them.
    """
    try:
        return body() or 0
    except PacelineError as error:
        launched = _tell_launcher(error)
        if launched or error.origin_rank in (None, int(os.environ.get(jobenv.RANK) or 0)):
            print(error.render(), file=sys.stderr, flush=True)
        return error.exit_code


def _tell_launcher(error: PacelineError) -> bool:
    """As the launcher hears of an uncaught exception; False without a launcher."""
    descriptor = os.environ.get(jobenv.EVENT_FD, "")
    if not descriptor.isdecimal():
        return False
    said = {
        "kind": "exception",
        "type": type(error).__name__,
        "message": error.message,
        "traceback": "\n".join(error.render().splitlines()[1:]),
        "hooked": False,
        "origin": error.origin_rank,
        "code": error.exit_code,  # which it may not live to give
        "time": time.monotonic(),
    }
    with contextlib.suppress(OSError):  # it is gone, and so is whoever could be told
        os.write(int(descriptor), json.dumps(said).encode() + b"\n")
        return True
    return False


def library(name: str, purpose: str, remedy: str = "pip install 'paceline[recipes]'") -> Any:
    """The imported library.

    Args:
        name: As imported.
        purpose: What it is for, as in "BLEU is computed".
        remedy: How it is installed.

    Raises:
        SettingError: It is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # a library for another torch raises the second
        raise SettingError(
            f"{purpose} with the library `{name}`",
            found=f"it cannot be imported: {error}",
            remedy=remedy,
        ) from None
