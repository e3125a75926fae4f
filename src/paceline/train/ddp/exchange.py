"""Averages the gradients of a script's own DDP model."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.distributed.distributed_c10d import _get_default_group
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.train.comms import Comms
from paceline.train.reduce import direct
from paceline.train.reduce.buckets import BucketExchange


class ScriptExchange(BucketExchange):
    """Averages the gradients of a DDP model that a script steps.

    Buckets are laid out anew before the next forward pass, and gradients that the script has
    accumulated stay. The model is referenced weakly: DDP's reducer holds this object, and what it
    holds is not garbage-collected.

    Attributes:
        is_attached: The hook is to be registered with each of DDP's reducers.
        on_pass: Called before the first bucket of each backward pass that exchanges gradients.
        on_pass_end: Called at the end of such a pass, with the averaged gradients in place, when
            every rank is there; ``None``: not needed.
        on_computed: Called when such a pass has computed its last gradient.
    """

    def __init__(self, model: DistributedDataParallel, comms: Comms) -> None:
        super().__init__(model, comms)
        parameters = model._build_params_for_reducer()[0]  # type: ignore[no-untyped-call]
        self._exchanged: set[nn.Parameter] = set(parameters)
        self.is_attached = False
        self.on_pass: Callable[[], None] = lambda: None
        self.on_computed: Callable[[], None] = lambda: None
        self.on_pass_end: Callable[[], None] | None = None
        self._is_in_use = False  # the script has had a backward pass
        self._pending_sizes: tuple[int, int] | None = None

    @property
    def model(self) -> DistributedDataParallel:
        model = self._model_reference()
        assert model is not None  # it calls
        return model

    @model.setter
    def model(self, model: DistributedDataParallel) -> None:
        self._model_reference = weakref.ref(model)

    @property
    def exchanged(self) -> set[nn.Parameter]:
        return self._exchanged

    @property
    def _needs_hook(self) -> bool:
        return self.is_attached

    def _make_group(self) -> dist.ProcessGroup | None:
        group: dist.ProcessGroup = self.model.process_group
        if group is _get_default_group():
            return super()._make_group()
        if self._stream is not None:
            return group
        own: dist.ProcessGroup = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=direct.timeout_of(group),
            use_local_synchronization=True,
        )
        return own

    def attach(self) -> None:
        """Registers the hook, now and with each later reducer of DDP."""
        self.is_attached = True
        self._hook()

    def expect_hook(self) -> None:
        """Leaves it to the script to register the hook with DDP's present reducer."""
        self.is_attached, self._hooked = True, self.model.reducer

    def set_bucket_sizes(self, size: int, first: int) -> None:
        if self._is_in_use:
            self._pending_sizes = size, first
        else:
            super().set_bucket_sizes(size, first)

    def reset(self) -> None:
        self._reducer = None

    def before_forward(self, *_: object) -> None:
        """Lays out the buckets as they are to be by now; a forward pre-hook of the model."""
        if self._pending_sizes is None or torch.compiler.is_compiling():
            return
        sizes, self._pending_sizes = self._pending_sizes, None
        gradients = [(parameter, parameter.grad) for parameter in self._exchanged]
        super().set_bucket_sizes(*sizes)
        for parameter, gradient in gradients:
            parameter.grad = gradient

    def reduce_bucket(self, ddp_bucket: GradBucket) -> Future[Tensor]:
        if ddp_bucket.index() == 0:
            self._is_in_use = True
            self.on_pass()
        mean = super().reduce_bucket(ddp_bucket)
        # Ranks without data (Join) reduce zeros outside of a backward pass.
        if ddp_bucket.is_last() and self.on_pass_end and not self.model._join_config.enable:
            Variable._execution_engine.queue_callback(self._end_computing)
        return mean

    def _end_computing(self) -> None:
        # DDP's own callback, which waits for the means, was queued before this second one.
        self.on_computed()
        if self.on_pass_end is not None:
            Variable._execution_engine.queue_callback(self.on_pass_end)
