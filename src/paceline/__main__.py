"""The entry point of ``paceline`` and ``python -m paceline``."""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def main() -> None:
    """Runs the program. Ctrl-C ends it quietly with the status of a shell, 128 + SIGINT.

    While the program is imported, there is nothing to clean up: it ends at once.
    """
    gc.set_threshold(10_000)  # imports make many objects and hardly any garbage
    is_handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_handled:  # not ignored, as in a background job of a script
        signal.signal(signal.SIGINT, _exit)
    from paceline.cli import main as run_program

    try:
        if is_handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run_program()
    except KeyboardInterrupt:  # before or after a verb
        sys.exit(128 + signal.SIGINT)
    except RuntimeError as error:
        # before Python 3.12, what interrupts the making of a class comes as "Error calling
        # __set_name__"
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        sys.exit(128 + signal.SIGINT)


def _exit(signum: int, _: FrameType | None) -> NoReturn:
    """Ends the process without a traceback; an exception could get lost in a callback."""
    os._exit(128 + signum)


if __name__ == "__main__":
    if __package__ and not getattr(sys.flags, "safe_path", False):  # the flag is of Python 3.11
        # `python -m` imports from the current folder first, which may be a run directory with files
        # of hosts
        del sys.path[0]
    main()
