"""A stand-in on CPUs for a process group whose collectives run on a device, like NCCL's.

An all-reduce is only queued: waiting for it returns at once, and its result comes later. If a lost
rank does not take part, it is stuck until the group is aborted, whatever gloo reports. Then it ends
as if it had succeeded, with invalid tensors, and further collectives fail. The other collectives
block until they are done or aborted, as a copy from the device to the host would.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed.distributed_c10d import _get_default_group
from torch.futures import Future

from paceline.train import device as devices
from paceline.train.elastic import device_group
from paceline.train.elastic.device_group import DeviceGroup

NAME = "standin"
LATE_S = 0.002  # delay before a queued collective runs
POLL_S = 0.0005
ABORT_S = "STANDIN_ABORT_S"
"""Variable: seconds that an abort takes."""
CONNECT = "STANDIN_CONNECT"
"""Variable: how a rank waits while it makes a communicator, `spin` or `sleep`; it is made by the
first collective, whatever the abort."""


class StandIn(dist.ProcessGroup):
    """Runs collectives over gloo in a thread, one after the other."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._jobs: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self.queued = self.done = 0
        self.aborted = threading.Event()
        self.error = ""
        self._is_connected = CONNECT not in os.environ
        threading.Thread(target=self._work, name="device", daemon=True).start()

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:  # the name is torch's
        return NAME

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names.get(self, ""))

    def abort(self) -> None:
        self.aborted.set()
        time.sleep(float(os.environ.get(ABORT_S, "0.05")))

    def shutdown(self) -> None:
        assert not self.aborted.is_set(), "an aborted group is not shut down"

    # -- collectives ---------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        def act() -> Any:
            return self._gloo.allreduce(tensors, opts)

        if not all(tensor.is_floating_point() for tensor in tensors):
            return self._block(tensors, act)  # DDP reads on the host which parameters were used
        self._queue(tensors, act)
        return _done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._block(tensors, lambda: self._gloo.broadcast(tensors, opts))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        return self._block(outputs[0], lambda: self._gloo.allgather(outputs, inputs, opts))

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        filled = outputs[0] if outputs else inputs
        return self._block(filled, lambda: self._gloo.gather(outputs, inputs, opts))

    def all_to_all_single(
        self, output: Tensor, given: Tensor, ours: Any, theirs: Any, opts: Any = None
    ) -> Any:
        def act() -> Any:
            return self._gloo.alltoall_base(output, given, ours or [], theirs or [])

        return self._block([output], act)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Any:
        return self._block([], lambda: self._gloo.barrier())

    def _connect(self) -> None:
        """Waits until all ranks have arrived; never returns if one of them is lost."""
        self._is_connected = True
        work = self._gloo.barrier()
        while not (work.is_completed() and _has_worked(work)):
            if os.environ[CONNECT] == "sleep":
                time.sleep(POLL_S)

    def _queue(self, tensors: list[Tensor], act: Callable[[], Any]) -> None:
        if not self._is_connected:
            self._connect()
        if self.aborted.is_set():
            raise dist.DistBackendError("the stand-in's communicator was aborted")

        def job() -> None:
            time.sleep(LATE_S)
            if not self._run(act):
                for tensor in tensors:
                    tensor.detach().fill_(float("nan") if tensor.is_floating_point() else 7)

        self.queued += 1
        self._jobs.put(job)

    def _block(self, tensors: list[Tensor], act: Callable[[], Any]) -> Any:
        self._queue(tensors, act)
        number = self.queued
        while self.done < number:
            time.sleep(POLL_S)
        return _done(tensors)

    def _run(self, act: Callable[[], Any]) -> bool:
        """Runs a collective; returns whether it succeeded."""
        try:
            work = None if self.aborted.is_set() else act()
            while work is not None and not self.aborted.is_set():
                if work.is_completed():
                    work.wait()
                    return True
                time.sleep(POLL_S)
        except RuntimeError as error:
            self.error = f"{error}"
        self.aborted.wait()  # stuck
        return False

    def _work(self) -> None:
        while True:
            self._jobs.get()()
            self.done += 1


def _has_worked(work: Any) -> bool:
    with contextlib.suppress(RuntimeError):
        work.wait()
        return True
    return False


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


class StandInGroup(DeviceGroup):
    """The device group through which a recovery uses the stand-in."""

    @classmethod
    def is_supported(cls) -> bool:
        return True

    def _find_backend(self) -> StandIn:
        group = _get_default_group()
        assert isinstance(group, StandIn)
        return group

    def _mark(self) -> Callable[[], bool]:
        group = self._backend
        number = 0 if group is None else group.queued
        return lambda: group is None or group.done >= number

    def _synchronize(self) -> None:
        is_finished = self._mark()
        while not is_finished():
            time.sleep(POLL_S)

    def _error_of(self, backend: StandIn) -> str:
        return backend.error


def use() -> None:
    """Makes this process's sessions use the stand-in in place of gloo."""
    warnings.filterwarnings("ignore", "Set timeout is now only supported")
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, StandIn, devices=["cpu"])
    device_group.GROUPS[NAME] = StandInGroup
    devices.choose_backend = lambda requested, *_: requested if requested == "gloo" else NAME
