"""How the gradients of a replica are averaged: by DDP itself, or by a reducer of ours.

DDP's reducer collects gradients in buckets. A hook passes each full bucket to one thread, which
averages them in the same order on every rank; on an accelerator a stream does the work. By default
three and more ranks have no hook, unless a lost rank can be replaced: what DDP waits for can then
be given up (``elastic/waits.py``). Ranks average a small model's gradients directly
(``reduce/small_messages.py``), and two ranks all of theirs (``reduce/direct.py``).
"""

from __future__ import annotations

import os
import queue
import threading
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.distributed_c10d import _get_default_group
from torch.futures import Future

from paceline.spec import jobenv
from paceline.train.comms import Comms
from paceline.train.elastic import waits
from paceline.train.parallel import Replica, bucket_megabytes, build_buckets
from paceline.train.reduce import direct, small_messages
from paceline.train.reduce.exact import Exact
from paceline.train.reduce.reducer import Bucket, GradientReducer, ReduceContext

_DDP_BUCKET_BYTES = 25 << 20  # when DDP chooses


class GradientExchange:
    """Averages one replica's gradients. Every rank has one and changes it alike.

    Attributes:
        model: Replica whose gradients are averaged.
        former_reducer: That of a former group of ranks, until another one has adopted its state.
    """

    def __init__(self, model: Replica, comms: Comms) -> None:
        self.model, self._comms = model, comms
        self._reducer: GradientReducer | None = None
        self._thread: _ReduceThread | None = None
        self._stream = torch.Stream(comms.device) if comms.device.type != "cpu" else None
        self._group: dist.ProcessGroup | None = None
        self._hooked: object = None  # DDP's reducer that has our hook
        self.former_reducer: GradientReducer | None = None
        self._choose_defaults()
        self._hook()

    @property
    def has_device_group(self) -> bool:
        return self._comms.has_device_group

    @property
    def elements(self) -> int:
        return sum(parameter.numel() for parameter in self.model.exchanged)

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.model.exchanged)

    def context(self) -> ReduceContext:
        """What a reducer of this exchange is made for; a collective when called first."""
        if self._group is None and self._stream is None and not self._comms.has_device_group:
            self._group = self._comms.new_group(timeout=direct.timeout_of(self.model.process_group))
        exchanged, parameters = self.model.exchanged, self.model.module.named_parameters()
        return ReduceContext(
            self._group,
            self._comms.world.rank,
            self._comms.world.size,
            {parameter: name for name, parameter in parameters if parameter in exchanged},
            can_roll_back=self.model.recovery is not None,
            has_unused=self.model.find_unused_parameters,
            element_bytes=self.nbytes / self.elements,
        )

    @property
    def reducer(self) -> GradientReducer | None:
        """Averages the gradients; ``None``: DDP's own exact way does."""
        return self._reducer

    @reducer.setter
    def reducer(self, reducer: GradientReducer) -> None:
        """To be set between two steps."""
        self._reducer = reducer
        self._hook()

    def commit(self) -> None:
        if self._reducer is not None:
            self._reducer.commit()

    def rollback(self) -> None:
        if self._reducer is not None:
            self._reducer.rollback()

    def set_bucket_sizes(self, size: int, first: int) -> None:
        """Lays the buckets out anew; to be called between two steps. Nothing is sent.

        Args:
            size: Bytes of a bucket, at least; a parameter is not divided.
            first: Bytes of the bucket that is full first.
        """
        self._hooked = None  # DDP's old reducer takes its hooks away when it is deleted
        self._lay_out(size, first)

    def reset(self) -> None:
        """Goes back to DDP's own exact way and first buckets; a collective, between two steps.

        Each gradient lies where it lay at first. With three and more ranks that decides in which
        order shares are added, so the last bits: a trial may not change them.
        """
        self._hooked = None
        self._comms.collective(self._reset)
        self._reducer = None

    def _reset(self) -> None:
        if not self._comms.stale:  # else all will be made anew
            self._reducer = None
            self._lay_out(*self._sizes, as_initial=True)

    def renew(self) -> None:
        """Begins anew in the job's present group of ranks; a collective, between two steps."""
        self._group = self._hooked = None
        self.model.process_group = _get_default_group()
        self.model.mark_synchronized()
        self._retire_reducer()
        self._lay_out(*self._sizes, as_initial=True)

    def include_trained(self) -> None:
        """Averages newly trained parameters, too; between two steps. Nothing is sent."""
        self.model.include_trained()
        self._retire_reducer()
        self.set_bucket_sizes(*self._sizes)

    def _retire_reducer(self) -> None:
        """Goes back to what the present group and parameters begin with."""
        self.former_reducer, self._reducer = self.former_reducer or self._reducer, None
        self._choose_defaults()

    def _choose_defaults(self) -> None:
        uses_gloo = self._comms.device.type == "cpu"
        megabytes = bucket_megabytes(self.model.exchanged) if uses_gloo else None
        self._sizes = _DDP_BUCKET_BYTES, _default_first_bytes()
        if megabytes is not None:
            self._sizes = int(megabytes * (1 << 20)), int(megabytes * (1 << 20))
        self._direct = self._make_exact() if self._is_small or self._is_pair else None

    def _make_exact(self) -> GradientReducer:
        return Exact(self.context(), is_small=self._is_small, is_pair=self._is_pair)

    @property
    def _is_small(self) -> bool:
        """Whether ranks average this model's gradients directly, whatever their buckets."""
        group, ranks = self.model.process_group, self._comms.world.size
        return self._on_cpus and small_messages.fits_model(self.nbytes, ranks, group)

    @property
    def _is_pair(self) -> bool:
        """Whether two ranks send each other all they have; in a probe they do as more would."""
        uses_gloo = self._on_cpus and "gloo" in dist.get_backend(self.model.process_group)
        return uses_gloo and self._comms.world.size == 2 and not os.environ.get(jobenv.PROBE)

    @property
    def _on_cpus(self) -> bool:
        return self._stream is None and not self._comms.mixed

    def _lay_out(self, size: int, first: int, *, as_initial: bool = False) -> None:
        """Gives the replica new buckets, without communication unless ``as_initial``.

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
        with model.original_parameters():
            parameters, sparse = model._build_params_for_reducer()  # type: ignore[no-untyped-call]
            names = model._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
            for parameter in parameters:
                parameter.grad = None
            model.bucket_bytes_cap, model.bucket_bytes_cap_default = size, True
            torch_dist: Any = dist  # what is replaced here for a moment is not public
            assign, default = torch_dist._compute_bucket_assignment_by_size, _default_first_bytes()

            def assign_reversed(
                tensors: list[Tensor], limits: list[int], *lists: Any
            ) -> tuple[list[list[int]], list[int]]:
                # Gradients come in reverse order, and the first bucket is counted from there.
                order = range(len(tensors) - 1, -1, -1)
                buckets, sizes = assign(
                    tensors[::-1], [first, size], *[each[::-1] for each in lists]
                )
                return [[order[i] for i in bucket] for bucket in reversed(buckets)], sizes[::-1]

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
            self._hook()
            if as_initial:
                build_buckets(model)

    def _hook(self) -> None:
        reducer = self._reducer or self._direct
        if reducer is not None and self._stream is None and self._thread is None:
            self._thread = _ReduceThread()
        # When ranks may be lost while DDP waits, it waits for what can be given up.
        is_queued = self._stream is not None or self._comms.has_device_group
        may_give_up = self.model.recovery is not None and not is_queued
        if self._hooked is self.model.reducer or not (reducer or may_give_up):
            return
        self.model.register_comm_hook(self, _on_bucket)
        self._hooked = self.model.reducer

    def reduce_bucket(self, ddp_bucket: GradBucket) -> Future[Tensor]:
        """Begins to average a bucket of DDP's; the future holds the mean."""
        reducer = self._reducer or self._direct
        if reducer is None:
            return self._reduce_as_ddp(ddp_bucket.buffer())
        bucket = Bucket(
            ddp_bucket.index(),
            ddp_bucket.buffer(),
            cast(list[nn.Parameter], ddp_bucket.parameters()),
            ddp_bucket.gradients(),
            ddp_bucket.is_last(),
        )
        if self._thread is None:
            return self._reduce_on_stream(bucket)
        return self._thread.reduce(reducer, bucket)

    def _reduce_as_ddp(self, flat: Tensor) -> Future[Tensor]:
        """By DDP's own exact way, to the bit."""
        group = self.model.process_group
        flat.mul_(1.0 / dist.get_world_size(group))
        return waits.cancellable_future(dist.all_reduce(flat, group=group, async_op=True), flat)

    def _reduce_on_stream(self, bucket: Bucket) -> Future[Tensor]:
        """The host only queues the work, in the right order; the device does it."""
        assert self._reducer is not None
        assert self._stream is not None
        device = bucket.flat.device
        future: Future[Tensor] = Future(devices=[device])
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        with self._stream:
            bucket.flat.record_stream(self._stream)
            with torch.no_grad():
                self._reducer.all_reduce(bucket)
            future.set_result(bucket.flat)
        return future

    def leave_group(self) -> None:
        """Ends this exchange's own connections, whose threads would else stay; by all ranks.

        DDP's reducer goes on to hold this object, which is not used any more.
        """
        group, self._group = self._group, None
        self._reducer = self._direct = self.former_reducer = None
        is_separate = group is not None and group is not _get_default_group()
        if is_separate and self._stream is None and not self._comms.stale:
            direct.leave(group)
            dist.destroy_process_group(group)

    def close(self) -> None:
        """Ends the thread; no backward pass may be running."""
        if self._thread is not None:
            self._thread.close()


def _on_bucket(exchange: GradientExchange, bucket: GradBucket) -> Future[Tensor]:
    return exchange.reduce_bucket(bucket)


# DDP looks at these, and does not understand those of postponed evaluation.
_on_bucket.__annotations__ = {"bucket": GradBucket, "return": Future[Tensor]}


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


def _default_first_bytes() -> int:
    return int(dist._DEFAULT_FIRST_BUCKET_BYTES)  # type: ignore[attr-defined]
