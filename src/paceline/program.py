"""Error handling and optional imports that the programs in a job share."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any

from paceline.spec import jobenv
from paceline.spec.errors import PacelineError, SettingError


def guarded(body: Callable[[], int | None]) -> int:
    """Runs ``body`` and returns its exit status. A PacelineError is printed without a traceback.

    The launcher receives the error and prints it once for all ranks; the text printed here goes to
    this rank's log. Without a launcher, an error that all ranks raise is printed by one of them.
    """
    try:
        return body() or 0
    except PacelineError as error:
        launched = _report_to_launcher(error)
        if launched or error.origin_rank in (None, int(os.environ.get(jobenv.RANK) or 0)):
            print(error.render(), file=sys.stderr, flush=True)
        return error.exit_code


def _report_to_launcher(error: PacelineError) -> bool:
    """Sends an error to the launcher as an uncaught exception; returns False without a launcher."""
    descriptor = os.environ.get(jobenv.EVENT_FD, "")
    if not descriptor.isdecimal():
        return False
    event = {
        "kind": "exception",
        "type": type(error).__name__,
        "message": error.message,
        "traceback": "\n".join(error.render().splitlines()[1:]),
        "hooked": False,
        "origin": error.origin_rank,
        "code": error.exit_code,  # the process may be killed before it exits
        "time": time.monotonic(),
    }
    with contextlib.suppress(OSError):  # the launcher is gone
        os.write(int(descriptor), json.dumps(event).encode() + b"\n")
        return True
    return False


def library(name: str, purpose: str, remedy: str = "") -> Any:
    """Imports an optional library.

    Args:
        name: Name of the module.
        purpose: What needs it, as in "BLEU is computed".
        remedy: How to install it; by default with pip, into the environment that lacks it.

    Raises:
        SettingError: The library is not installed or cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
        distribution = name.partition(".")[0].replace("_", "-")
        raise SettingError(
            f"{purpose} with the library `{name}`",
            found=f"it cannot be imported: {error}",
            remedy=remedy
            or f"{shlex.quote(sys.executable)} -m pip install --upgrade {distribution}",
        ) from None
