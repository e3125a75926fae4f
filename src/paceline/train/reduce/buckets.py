"""Averages the gradient buckets of a DDP model by a reducer, through DDP's communication hook.

DDP's reducer collects gradients in buckets. The hook passes each full bucket to one thread, which
averages them in the same order on every rank; on an accelerator a stream does the work.
"""

from __future__ import annotations

import queue
import threading
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.train.comms import Comms
from paceline.train.parallel import build_buckets, only_trained
from paceline.train.reduce import direct
from paceline.train.reduce.collectives import ReduceContext
from paceline.train.reduce.reducer import Bucket, GradientReducer


class BucketExchange:
    """Averages one model's gradients. Every rank has one and changes it alike.

    Attributes:
        model: DDP model whose gradients are averaged.
        keeps_order: Gradients lie in the reverse order of the parameters in every step. Otherwise
            they lie, after the first pass with new buckets, in the order in which they came in it.
        former_reducer: That of a former group of ranks, until another one has adopted its state.
    """

    keeps_order: ClassVar[bool] = False

    def __init__(self, model: DistributedDataParallel, comms: Comms) -> None:
        self.model, self._comms = model, comms
        self._reducer: GradientReducer | None = None
        self._direct: GradientReducer | None = None  # averages exactly, in place of DDP
        self._thread: _ReduceThread | None = None
        self._stream = torch.Stream(comms.device) if comms.device.type != "cpu" else None
        self._group: dist.ProcessGroup | None = None
        self._hooked: object = None  # DDP's reducer that has our hook
        self.former_reducer: GradientReducer | None = None

    @property
    def exchanged(self) -> set[nn.Parameter]:
        """The parameters whose gradients are averaged."""
        raise NotImplementedError

    @property
    def elements(self) -> int:
        return sum(parameter.numel() for parameter in self.exchanged)

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.exchanged)

    @property
    def can_roll_back(self) -> bool:
        """Whether ranks may be lost in a pass, which then does not count."""
        return False

    def context(self) -> ReduceContext:
        """What a reducer of this exchange is made for; a collective when called first."""
        if self._group is None:
            self._group = self._make_group()
        exchanged, parameters = self.exchanged, self.model.module.named_parameters()
        return ReduceContext(
            self._group,
            self._comms.world.rank,
            self._comms.world.size,
            {parameter: name for name, parameter in parameters if parameter in exchanged},
            can_roll_back=self.can_roll_back,
            has_unused=self.model.find_unused_parameters,
            element_bytes=self.nbytes / self.elements,
        )

    def _make_group(self) -> dist.ProcessGroup | None:
        """Makes a group for the thread; the stream of an accelerator uses the default group."""
        if self._stream is not None or self._comms.has_device_group:
            return None
        return self._comms.new_group(timeout=direct.timeout_of(self.model.process_group))

    @property
    def reducer(self) -> GradientReducer | None:
        """Averages the gradients; ``None``: DDP's own exact way does."""
        return self._reducer

    @reducer.setter
    def reducer(self, reducer: GradientReducer) -> None:
        """Changes the reducer; call it between two steps."""
        self._reducer = reducer
        self._hook()

    def commit(self) -> None:
        if self._reducer is not None:
            self._reducer.commit()

    def set_bucket_sizes(self, size: int, first: int) -> None:
        """Lays the buckets out anew; to be called between two steps. Nothing is sent.

        Args:
            size: Bytes of a bucket, at least; a parameter is not divided.
            first: Bytes of the bucket that is full first.
        """
        self._hooked = None  # DDP's old reducer takes its hooks away when it is deleted
        self._lay_out(size, first)

    def reset(self) -> None:
        """Goes back to DDP's own exact way; a collective, between two steps."""
        raise NotImplementedError

    def _lay_out(self, size: int, first: int, *, as_initial: bool = False) -> None:
        """Gives the model new buckets, without communication unless ``as_initial``.

        DDP makes its buckets when it is made, all in one, and again after the first backward pass;
        it has no way to make them later. But its own helper makes a new reducer, as it does for a
        model that was unpickled.

        Args:
            size: Bytes of a bucket, at least.
            first: Bytes of the bucket that is full first.
            as_initial: Each gradient is to lie where it does when a replica is made with these
                sizes; for that gradients of zero are exchanged, as they are then.
        """
        model = self.model
        with only_trained(model, self.exchanged):
            parameters, sparse = model._build_params_for_reducer()  # type: ignore[no-untyped-call]
            for parameter in parameters:
                parameter.grad = None
            if not as_initial:  # buckets are divided, and kept, in the order of parameters here
                parameters, sparse = parameters[::-1], sparse[::-1]
            names = model._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
            model.bucket_bytes_cap, model.bucket_bytes_cap_default = size, True
            torch_dist: Any = dist  # what is replaced here for a moment is not public
            assign, default = torch_dist._compute_bucket_assignment_by_size, default_first_bytes()

            def assign_reversed(
                tensors: list[Tensor], limits: list[int], *lists: Any
            ) -> tuple[list[list[int]], list[int]]:
                buckets, sizes = assign(tensors, [first, size], *lists)
                return buckets[::-1], sizes[::-1]  # DDP takes the last one first

            model.reducer = model.logger = None  # type: ignore[assignment]  # takes its own hooks away
            if not as_initial:
                torch_dist._compute_bucket_assignment_by_size = assign_reversed
            torch_dist._DEFAULT_FIRST_BUCKET_BYTES = first
            config = getattr(model, "_bucket_config", None)  # from torch 2.13 on
            if config is not None:
                model._bucket_config = type(config)(size, (), first)
            try:
                model._ddp_init_helper(parameters, sparse, names, model.static_graph)  # type: ignore[no-untyped-call]
            finally:
                torch_dist._compute_bucket_assignment_by_size = assign
                torch_dist._DEFAULT_FIRST_BUCKET_BYTES = default
            # The reducer has its sizes. torch's compiler reads this one, to divide its graphs, and
            # has none below the usual first bucket's.
            model.bucket_bytes_cap = max(size, default)
            model._has_rebuilt_buckets = False
            if model.static_graph:
                model.reducer._set_static_graph()
                # Else DDP would not average this reducer's first pass, nor any later one.
                model._static_graph_delay_allreduce_enqueued = False
            self._hook()
            if as_initial:
                build_buckets(model)
            elif self.keeps_order:
                model.reducer._push_all_rebuilt_params()  # as if gradients had come in this order

    def _hook(self) -> None:
        """Registers the hook with DDP's reducer, if one is needed."""
        if self._active_reducer is not None and self._stream is None and self._thread is None:
            self._thread = _ReduceThread()
        if self._needs_hook and self._hooked is not self.model.reducer:
            self.model.register_comm_hook(self, average_bucket)
            self._hooked = self.model.reducer

    @property
    def _active_reducer(self) -> GradientReducer | None:
        return self._reducer or self._direct

    @property
    def _needs_hook(self) -> bool:
        return self._active_reducer is not None

    def reduce_bucket(self, ddp_bucket: GradBucket) -> Future[Tensor]:
        """Begins to average a bucket of DDP's; the future holds the mean."""
        reducer = self._active_reducer
        if reducer is None:
            return self._reduce_as_ddp(ddp_bucket)
        bucket = Bucket(
            ddp_bucket.index(),
            ddp_bucket.buffer(),
            cast(list[nn.Parameter], ddp_bucket.parameters()),
            ddp_bucket.gradients(),
            ddp_bucket.is_last(),
        )
        if self._thread is None:
            return self._reduce_on_stream(reducer, bucket)
        return self._thread.reduce(reducer, bucket)

    def _reduce_as_ddp(self, ddp_bucket: GradBucket) -> Future[Tensor]:
        """Averages a bucket as DDP does without a hook, to the bit."""
        return allreduce_hook(self.model.process_group, ddp_bucket)

    def _reduce_on_stream(self, reducer: GradientReducer, bucket: Bucket) -> Future[Tensor]:
        """The host only queues the work, in the right order; the device does it."""
        assert self._stream is not None
        device = bucket.flat.device
        future: Future[Tensor] = Future(devices=[device])
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        with self._stream:
            bucket.flat.record_stream(self._stream)
            with torch.no_grad():
                reducer.all_reduce(bucket)
            future.set_result(bucket.flat)
        return future

    def close(self) -> None:
        """Ends the thread; no backward pass may be running."""
        if self._thread is not None:
            self._thread.close()


def average_bucket(exchange: BucketExchange, bucket: GradBucket) -> Future[Tensor]:
    """The communication hook; its state is the exchange."""
    return exchange.reduce_bucket(bucket)


# DDP looks at these, and does not understand those of postponed evaluation.
average_bucket.__annotations__ = {"bucket": GradBucket, "return": Future[Tensor]}


class _ReduceThread:
    """The thread that averages buckets, one after the other."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[GradientReducer, Bucket, Future[Tensor]] | None]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="gradients", daemon=True)
        # In it torch is to have no further threads: those that compute would keep them waiting.
        # That is a thread's own number, but also the one that later threads begin with.
        num_threads, self._is_set_up = torch.get_num_threads(), threading.Event()
        self._thread.start()
        self._is_set_up.wait()
        torch.set_num_threads(num_threads)

    def reduce(self, reducer: GradientReducer, bucket: Bucket) -> Future[Tensor]:
        """Has the bucket averaged when its turn comes; the future holds the mean, or the error."""
        mean: Future[Tensor] = Future()
        self._queue.put((reducer, bucket, mean))
        return mean

    def _work(self) -> None:
        torch.get_num_threads()  # or torch would begin later with what holds for others
        torch.set_num_threads(1)
        self._is_set_up.set()
        while (job := self._queue.get()) is not None:
            reducer, bucket, mean = job
            try:
                with torch.no_grad():
                    reducer.all_reduce(bucket)
                mean.set_result(bucket.flat)
            except Exception as error:  # raised by who waits for it
                mean.set_exception(error)  # type: ignore[arg-type]
            del job, reducer, bucket, mean  # none is held while waiting for the next

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


def default_first_bytes() -> int:
    return int(dist._DEFAULT_FIRST_BUCKET_BYTES)  # type: ignore[attr-defined]
