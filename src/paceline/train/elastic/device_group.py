"""The job's process group if a device runs its collectives, as NCCL does.

The host only queues such a collective. One that a lost rank does not take part in never ends, and
an aborted one ends as if it had worked, with anything in its tensors. So gradients are used only
after the device has finished them in a group that was not aborted (:meth:`DeviceGroup.wait`); see
``docs/explanation/decisions/0026-gpu-ranks-abort-and-wait-for-gradients.md``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from paceline.spec.errors import JobError
from paceline.spec.failure import CONNECTIONS_CUT
from paceline.train.elastic.waits import WaitCancelled

_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_OWN_HANDLING = {_ERROR_HANDLING: "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""torch then neither aborts the group nor ends the process; it reads them when a group is made."""
_LAUNCHER_DEFAULT = "1"  # as the launcher sets it for all ranks; another value is the user's
_POLL_SHARE = 0.02  # of the time waited so far, between two looks at the device
_MIN_POLL_S, _MAX_POLL_S = 5e-5, 0.02
_WATCH_INTERVAL_S = 0.2  # between two looks whether the backend reports an error
_END_S = 30.0  # in which the device must come to rest after an abort
_ABORT_S = 10.0  # in which an abort returns; later the device is looked at without it


class DeviceGroup:
    """The job's process group on an accelerator, as a recovery uses it.

    A group is taken (:meth:`attach`), aborted by any thread (:meth:`abort`), and left by the thread
    that trains (:meth:`leave`) before the next one is made and taken.

    Attributes:
        on_error: Called in a thread of its own with an error that the backend reports.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._backend: Any = None
        self._is_aborted = False
        self._aborting: threading.Thread | None = None
        self.on_error: Callable[[str], None] = end_process
        self._is_watching = False

    @contextlib.contextmanager
    def forming(self) -> Iterator[None]:
        """Context in which the default group is made: its errors are left to this object."""
        former = {name: os.environ.get(name) for name in _OWN_HANDLING}
        os.environ.update(_OWN_HANDLING)
        try:
            yield
        finally:
            for name, value in former.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def attach(self) -> None:
        """Uses the new default group, and from now on reports errors of its backend."""
        with self._lock:
            self._backend, self._is_aborted = self._find_backend(), False
        if not self._is_watching:
            self._is_watching = True
            threading.Thread(target=self._poll_errors, name="paceline-device", daemon=True).start()

    def connect(self) -> None:
        """Makes the communicator of the default group, by a collective of all its ranks.

        torch knows a communicator only when it is made. Until then an abort does not reach it: if
        a rank is lost meanwhile, this may never return, and the launcher ends the process.

        Raises:
            RuntimeError: It could not be made, or the group was aborted.
        """
        dist.all_reduce(torch.zeros(1, device=self._device))
        self.wait()

    def wait(self) -> None:
        """Waits until the device has done what is queued on its current stream.

        Raises:
            WaitCancelled: The group was aborted: nothing that its collectives have left counts.
        """
        is_finished, start = self._mark(), time.perf_counter()
        while not is_finished():
            self._check()
            pause_s = _POLL_SHARE * (time.perf_counter() - start)
            time.sleep(max(_MIN_POLL_S, min(_MAX_POLL_S, pause_s)))
        self._check()  # an aborted collective finishes, too

    def abort(self) -> None:
        """Ends all collectives of the group; returns at once, and may be called again."""
        with self._lock:
            if self._is_aborted or self._backend is None:
                return
            self._is_aborted = True  # before any collective ends by it
            arguments = (self._backend,)
            self._aborting = threading.Thread(target=self._abort, args=arguments, daemon=True)
            self._aborting.start()

    def leave(self) -> None:
        """Aborts the group, and waits until the device has nothing of it left to do.

        An abort that does not return is left to its thread if the device is idle all the same.

        Raises:
            JobError: The device does not come to rest, or reports an error.
        """
        self.abort()
        deadline = time.monotonic() + _END_S
        if self._aborting is not None:
            self._aborting.join(_ABORT_S)
        errors: list[RuntimeError] = []

        def synchronize() -> None:
            try:
                self._synchronize()
            except RuntimeError as error:
                errors.append(error)

        waiting = threading.Thread(target=synchronize, daemon=True)  # it has no limit of its own
        waiting.start()
        waiting.join(max(0.0, deadline - time.monotonic()))
        if errors:  # of this rank itself: another group would not help it
            cause = str(errors[0]).partition("\n")[0]
            raise JobError("the device failed while its group was left", found=cause) from errors[0]
        if waiting.is_alive():
            raise JobError(
                "a collective of the device does not end though it was aborted",
                found=f"after {_END_S:.0f} s {self._device} has not finished it",
            )
        self.forget()

    def forget(self) -> None:
        """Keeps torch from shutting the aborted group down, which may wait for the lost rank.

        The group stays in memory: its destructor joins threads that may never end.
        """
        with self._lock:
            self._backend, self._is_aborted, self._aborting = None, False, None
        names = dist.distributed_c10d._world.pg_names
        for group in [group for group in names if "gloo" not in dist.get_backend(group)]:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            del names[group]

    def _check(self) -> None:
        if self._is_aborted:
            raise WaitCancelled(CONNECTIONS_CUT)

    def _poll_errors(self) -> None:
        reported: Any = None
        while True:
            time.sleep(_WATCH_INTERVAL_S)
            backend = self._backend
            if backend is None or backend is reported or self._is_aborted:
                continue
            error = self._error_of(backend)
            if error and backend is self._backend:  # else there is a new group by now
                reported = backend
                self.on_error(error)

    # -- the backend -----------------------------------------------------------------------

    @classmethod
    def is_supported(cls) -> bool:
        """Whether this version of torch reports the backend's errors."""
        return hasattr(getattr(dist, "ProcessGroupNCCL", None), "get_error")

    def _find_backend(self) -> Any:
        return _get_default_group()._get_backend(self._device)

    def _mark(self) -> Callable[[], bool]:
        """Returns a function that tells whether all that is queued by now is done."""
        event: torch.Event = torch.get_device_module(self._device).Event()
        event.record()
        return event.query

    def _synchronize(self) -> None:
        """Waits until the device has done what is queued on all its streams."""
        torch.get_device_module(self._device).synchronize(self._device)

    def _abort(self, backend: Any) -> None:
        with contextlib.suppress(RuntimeError):  # :meth:`leave` sees whether the device is freed
            backend.abort()

    def _error_of(self, backend: Any) -> str:
        error = backend.get_error()
        return "" if error.name == "SUCCESS" else str(error.name)


GROUPS: dict[str, type[DeviceGroup]] = {"nccl": DeviceGroup}
"""Groups by the name of their backend."""


def make_device_group(
    backend: str, device: torch.device, environ: Mapping[str, str]
) -> DeviceGroup | None:
    """Returns the group for a backend; ``None`` if its ranks cannot go on without a lost one.

    That is so for other backends, for versions of torch that do not report a backend's errors, and
    if the user has chosen how torch handles them.
    """
    kind = GROUPS.get(backend)
    is_chosen = environ.get(_ERROR_HANDLING, _LAUNCHER_DEFAULT) != _LAUNCHER_DEFAULT
    return None if kind is None or not kind.is_supported() or is_chosen else kind(device)


def end_process(error: str) -> None:
    """Ends this process as torch does when a collective has failed."""
    print(f"a collective of the device has failed: {error}", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGABRT)
