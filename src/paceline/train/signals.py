"""Notice from outside: save and stop, or save and go on."""

from __future__ import annotations

import signal
import threading
from types import FrameType

_STOP = (signal.SIGTERM, signal.SIGUSR1)  # SIGUSR1: what batch systems are asked to send early
_SAVE = (signal.SIGUSR2,)


class Notice:
    """Takes the signals while it is open; the training looks at it at every beat.

    Attributes:
        stop: Name of the signal that asked to stop; empty while none has.
        save: True when a checkpoint was asked for.
    """

    def __init__(self) -> None:
        self.stop = ""
        self.save = False
        self._before: dict[int, object] = {}

    def open(self) -> None:
        """Begins to listen, where this is the main thread (signals go nowhere else)."""
        if threading.current_thread() is threading.main_thread():
            for number in (*_STOP, *_SAVE):
                self._before[number] = signal.signal(number, self._take)

    def _take(self, number: int, _: FrameType | None) -> None:
        if number in _SAVE:
            self.save = True
            return
        self.stop = signal.Signals(number).name
        # Who asks twice does not want to wait for the next beat.
        signal.signal(number, signal.SIG_DFL)

    def close(self) -> None:
        """Puts the former handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()
