"""Ends a rank's interpreter without the abort that gloo's threads can cause.

A gloo worker that releases a tensor during teardown cannot get the interpreter's lock, and the
process dies of SIGABRT after a finished training. So a rank with such threads does all that a
script can see of Python's exit, and then leaves without tearing down.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import io
import os
import signal
import sys
import threading
from typing import Any, Callable, List

from ..supervision import gloo_threads

_FLUSH_FAILED = 120  # Python's own status for output that could not be written


def is_safe() -> bool:
    """Whether the process has no gloo threads, which can abort an ordinary exit."""
    return not gloo_threads.threads("self", gloo_threads.WORKER_THREADS)


def exit_status(exit_request: SystemExit) -> int:
    """Returns Python's exit status for a SystemExit code; writes its message as Python does."""
    code = exit_request.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    with contextlib.suppress(Exception):
        sys.stderr.write("%s\n" % (code,))
    return 1


def exit_process(status: int) -> None:
    """Ends the process as the interpreter would, and does not return.

    Args:
        status: Exit status; a negative one is the number of the signal of which it dies.
    """
    _suppressed(threading._shutdown)  # type: ignore[attr-defined]
    _suppressed(atexit._run_exitfuncs)
    _flush_open_files()
    if threading.active_count() == 1:  # daemon threads may still look at the script's names
        _clear_main()
        _flush_open_files()  # what finalizers have written
    failed = [not _flush(stream) for stream in (sys.stdout, sys.stderr)]
    _suppressed(lambda: ctypes.CDLL(None).fflush(None))  # what C libraries have printed
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(_FLUSH_FAILED if failed[0] and not status else status)


def _suppressed(action: Callable[[], Any]) -> None:
    """Runs a step of the exit, whose exceptions change nothing."""
    with contextlib.suppress(BaseException):
        action()


def _clear_main() -> None:
    """Drops the script's names, private ones first, so that what they held is finalized."""
    main = sys.modules.get("__main__")
    names: List[str] = [name for name in vars(main) if name != "__builtins__"] if main else []
    for name in sorted(names, key=lambda name: not name.startswith("_")):
        _suppressed(functools.partial(setattr, main, name, None))
    _suppressed(gc.collect)


def _flush_open_files() -> None:
    """Flushes files that the script left open; text layers before the buffers below them."""
    files = [file for file in gc.get_objects() if issubclass(type(file), io.IOBase)]
    for kind in (io.TextIOBase, io.BufferedIOBase):
        for file in files:
            if isinstance(file, kind):
                _suppressed(file.flush)


def _flush(stream: Any) -> bool:
    try:
        if stream is not None and not stream.closed:
            stream.flush()
    except Exception:
        return False
    return True
