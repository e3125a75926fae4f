"""Compresses the gradients of a script's DDP model by the methods of a session."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.distributed_c10d import _get_default_group
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.spec import jobenv
from paceline.spec.errors import SettingError
from paceline.spec.training.communication import SCRIPT_METHODS
from paceline.train import report
from paceline.train.comms import Comms
from paceline.train.ddp.exchange import ScriptExchange
from paceline.train.measure.pace import StepTimer
from paceline.train.parallel import check_dense
from paceline.train.reduce.buckets import BucketExchange, average_bucket
from paceline.train.reduce.choice import Communication
from paceline.train.world import World

_ASSUMED_STEPS = 200  # of a training, whose first tenth int4 sends in 8 bits

Hook = Callable[[Any, GradBucket], Future[Tensor]]


def communication_hook(model: DistributedDataParallel, method: str) -> tuple[BucketExchange, Hook]:
    """Returns state and hook for ``model.register_comm_hook``, to send gradients in fewer bytes.

    ::

        model = DistributedDataParallel(network)
        model.register_comm_hook(*communication_hook(model, "int8"))

    Every rank calls it, before the first backward pass. Rounding errors are kept by parameter and
    added to the next gradients (error feedback), in memory only.

    Args:
        method: ``fp16``, ``bf16``, ``int8``, ``int4`` or ``auto``, as for ``session.prepare``.

    Raises:
        SettingError: The method is unknown, or not possible for this model.
    """
    exchange = _make_exchange(model, method, f'communication_hook(…, "{method}")')
    exchange.expect_hook()
    return exchange, average_bucket


def attach(model: DistributedDataParallel, method: str) -> None:
    """Compresses the gradients of a model that DDP has just made, for ``--communication``."""
    option = f"--communication {method}"
    _make_exchange(model, method, option).attach()
    if model.process_group.rank() == 0:
        _reporter().event("communication", text=f"by {method}, as {option} says")


def _make_exchange(model: DistributedDataParallel, method: str, option: str) -> ScriptExchange:
    """Makes the exchange of a method; the caller registers its hook.

    ``option`` says in errors how the method was asked for.
    """
    _check(model, method, option)
    comms = Comms(_place(model.process_group), model.device)
    exchange = ScriptExchange(model, comms)
    if comms.is_alone:
        return exchange
    communication = Communication(method, exchange, comms)
    text = communication.begin(_ASSUMED_STEPS, 0)
    if text and comms.world.rank == 0:
        _reporter().message(text)
    _Steps(model, exchange, communication, comms)
    weakref.finalize(model, exchange.close).atexit = False
    return exchange


def _check(model: DistributedDataParallel, method: str, option: str) -> None:
    def refuse(found: str, remedy: str) -> None:
        raise SettingError(f"{option} is not possible here", found=found, remedy=remedy)

    group = model.process_group
    if method not in SCRIPT_METHODS:
        refuse("there is no such method", f"one of {', '.join(SCRIPT_METHODS)}")
    if model._comm_hooks or getattr(model, "_use_python_reducer", False):
        refuse(
            "this DistributedDataParallel has a communication hook of its own (mixed_precision=…"
            " and compiled autograd have one)",
            "leave out one of the two",
        )
    if method == "auto" and group is not _get_default_group():
        refuse(
            "auto measures all ranks, and this DistributedDataParallel has only some of them",
            "name a method, such as int8",
        )
    if model.device.type != "cpu" and dist.get_backend(group) == "gloo":
        refuse("gloo carries the gradients of accelerators", 'init_process_group("nccl")')
    check_dense(model.module, option)


def _place(group: dist.ProcessGroup) -> World:
    return World(
        rank=group.rank(),
        size=group.size(),
        local_size=int(os.environ.get(jobenv.LOCAL_WORLD_SIZE, "1")),
        host=os.environ.get(jobenv.HOST, ""),
    )


def _reporter() -> report.Reporter:
    return report.reporter(os.environ, dist.get_rank(), Path(), quiet=True)


class _Steps:
    """Follows the steps of a script by its backward passes, for ``int4`` and ``auto``."""

    def __init__(
        self,
        model: DistributedDataParallel,
        exchange: ScriptExchange,
        communication: Communication,
        comms: Comms,
    ) -> None:
        self._communication, self._steps = communication, 0
        exchange.on_pass = self._begin_pass
        if communication.requested.name != "auto":
            return
        self._timer: StepTimer | None = None
        reference = cast(nn.Module, weakref.proxy(model))  # as in the exchange
        self._make_timer = functools.partial(StepTimer, comms, reference, comms.device)
        self._reporter = _reporter()
        exchange.on_computed, exchange.on_pass_end = self._end_computing, self._end_pass
        model.register_forward_pre_hook(exchange.before_forward)

    def _begin_pass(self) -> None:
        self._communication.stepped(self._steps)
        self._steps += 1

    def _end_computing(self) -> None:
        if self._timer is not None:
            self._timer.mark_backward_end()

    def _end_pass(self) -> None:
        """Takes the time of a step that began at the end of the last one's pass."""
        timer = self._timer
        if timer is None:  # what came before is no step
            self._timer = self._make_timer()
            return
        timer.end_backward()
        timings = timer.step(0, 0.0)
        self._communication.computed(timer.last_computing_s)
        if timings is not None and (text := self._communication.consider(timings)):
            self._reporter.message(text)
            if dist.get_rank() == 0:
                self._reporter.event("communication", step=self._steps, text=text)
        timer.end_session_work()
