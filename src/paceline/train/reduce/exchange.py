"""How the gradients of a replica come together: by DDP itself, or by a method of ours.

DDP's reducer stays: it puts gradients into buckets, in the order in which they come, and tells a
hook of each bucket that is full. The hook passes it on to one thread, the mover, which averages
one after the other, in the same order on every rank, while the backward pass goes on. On an
accelerator no thread is needed: there a stream of its own does the work.

Plain exact averages need no hook where DDP's own path does as well, so by default three and more
ranks have none. There is one all the same where a lost rank is made good: what DDP waits for can
then be given up (``elastic/waits.py``). They average a little model's gradients directly
(``reduce/small_messages.py``), and two ranks all of theirs (``reduce/direct.py``).
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.distributed_c10d import _get_default_group
from torch.futures import Future

from paceline.spec import jobenv
from paceline.train.comms import Comms
from paceline.train.elastic import waits
from paceline.train.parallel import Replica, bucket_megabytes, moving_buffers, settle_buckets
from paceline.train.reduce import direct, small_messages


@dataclass(slots=True)
class Bucket:
    """Gradients of one backward pass that travel together.

    Attributes:
        number: 0, 1, … in the order in which they are sent.
        flat: This rank's gradients, one-dimensional; :meth:`Method.average` makes it the mean
            over all ranks, in place.
        parameters: Whose gradients they are.
        gradients: Parts of ``flat`` in the same order, with the parameters' shapes.
        last: No other comes after it in this backward pass.
    """

    number: int
    flat: Tensor
    parameters: list[nn.Parameter]
    gradients: list[Tensor]
    last: bool


@dataclass(frozen=True, slots=True)
class Line:
    """What a method sends over.

    Attributes:
        group: Of its own: nobody else's collectives come in between. ``None`` is the whole job's.
        rank: Of this process in it.
        ranks: In it.
        names: Of each parameter, for rests that a checkpoint holds.
        void: A pass may turn out not to count: ranks may be lost in the middle of it.
        unused: A pass may leave parameters without gradient on every rank, whose mean nobody gets.
        width: Bytes of an element of the gradients, in the mean over all.
    """

    group: dist.ProcessGroup | None
    rank: int
    ranks: int
    names: Mapping[Tensor, str] = field(default_factory=dict)
    void: bool = False
    unused: bool = False
    width: float = 4.0


class Method(Protocol):
    """A way of averaging gradients; made for a :class:`Line`."""

    name: ClassVar[str]

    def average(self, bucket: Bucket) -> None:
        """Makes ``bucket.flat`` the mean over all ranks: the same bits on every rank.

        Called in bucket order, on every rank; on CPUs in the mover's thread, on an accelerator
        within a stream of its own.
        """

    def counted(self) -> None:
        """The last pass counts: the optimizer has stepped with its means."""

    def void(self) -> None:
        """The last pass does not count; where that may be, the line says so."""

    def follow(self, other: Method) -> None:
        """Goes on where another method stopped, also one of another number of ranks."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold, by parameter name."""

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes a state of :meth:`state`, also one of another world size."""

    def alike(self) -> dict[str, Any]:
        """What is the same on every rank of what a checkpoint holds; no collective."""

    def take_alike(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`alike` gave; what this rank has not said yet stays."""

    def sent(self, elements: int, ranks: int) -> int:
        """Bytes that this rank sends for so many elements of gradients."""


class Exchange:
    """The exchange of one replica's gradients. Every rank has one and changes it alike.

    Args:
        model: Whose buckets they are.
        comms: Of all ranks.

    Attributes:
        usual: Bytes of a bucket and of the first, as the replica was made with.
        left: The method of a former group of ranks, until another one has followed it.
    """

    def __init__(self, model: Replica, comms: Comms) -> None:
        self._model, self._comms = model, comms
        self._method: Method | None = None
        self._mover: _Mover | None = None
        self._stream = torch.Stream(comms.device) if comms.device.type != "cpu" else None
        self.usual = usual_buckets(model.exchanged, over_gloo=self._over_gloo)
        self._group: dist.ProcessGroup | None = None
        self._hooked: object = None
        self.left: Method | None = None
        self._directly = self._exact() if self._is_little or self._of_two else None
        self._hook()

    @property
    def elements(self) -> int:
        """Gradients that are exchanged in a step."""
        return sum(one.numel() for one in self._model.exchanged)

    @property
    def nbytes(self) -> int:
        """Bytes of these gradients, as they are."""
        return sum(one.nbytes for one in self._model.exchanged)

    def send_buffers(self, sent: bool) -> None:
        """Whether rank 0 sends its buffers to all before each forward pass, as DDP does."""
        self._model.broadcast_buffers = sent

    def moving_buffers(self) -> list[Tensor]:
        """The model's buffers that training changes."""
        return moving_buffers(self._model.module)

    def line(self) -> Line:
        """What a method of this exchange is made for; a collective when called first."""
        if self._group is None and self._stream is None:
            self._group = self._comms.new_group(timeout=_timeout(self._model.process_group))
        exchanged = {*self._model.exchanged}
        every = self._model.module.named_parameters()
        names = {one: name for name, one in every if one in exchanged}
        world, void = self._comms.world, self._model.recovery is not None
        unused = self._model.find_unused_parameters
        width = self.nbytes / self.elements
        return Line(self._group, world.rank, world.size, names, void, unused, width)

    @property
    def method(self) -> Method | None:
        """How gradients are averaged; ``None`` is DDP's own exact way."""
        return self._method

    @method.setter
    def method(self, method: Method) -> None:
        """To be set between two steps."""
        self._method = method
        self._hook()

    def buckets(self, size: int, first: int) -> None:
        """Lays the buckets out anew; to be called between two steps. Nothing is sent.

        Args:
            size: Bytes of a bucket, at least; a parameter is not divided.
            first: Bytes of the bucket that is full first.
        """
        self._hooked = None  # the old reducer takes its hooks away when nobody holds it
        lay_out(self._model, size, first)
        self._hook()

    def as_made(self) -> None:
        """Goes back to DDP's own exact way and its first buckets; a collective, between two steps.

        Each gradient lies where it lay at first. With three and more ranks that decides in which
        order shares are added, so the last bits: a trial may not change them.
        """
        self._hooked = None
        self._comms.meet(self._lay_out_as_made)
        self._method = None

    def _lay_out_as_made(self) -> None:
        if not self._comms.stale:  # else all will be made anew
            self._method = None
            lay_out(self._model, *self.usual, as_made=True, made=self._hook)

    def renew(self) -> None:
        """Begins anew in the job's present group of ranks; a collective, between two steps."""
        self._group = self._hooked = None
        self._model.process_group = _get_default_group()
        self._model.aligned()
        self._leave_method()
        lay_out(self._model, *self.usual, as_made=True, made=self._hook)

    @property
    def thawed(self) -> bool:
        """Whether parameters are trained by now whose gradients are not averaged."""
        return self._model.thawed

    def widen(self) -> None:
        """Averages those, too, from now on; between two steps. Nothing is sent."""
        self._model.widen()
        self._leave_method()
        self.buckets(*self.usual)

    def _leave_method(self) -> None:
        """Goes back to what the present group and parameters begin with."""
        self.usual = usual_buckets(self._model.exchanged, over_gloo=self._over_gloo)
        self.left, self._method = self.left or self._method, None
        self._directly = self._exact() if self._is_little or self._of_two else None

    @property
    def _over_gloo(self) -> bool:
        return self._comms.device.type == "cpu"

    def _exact(self) -> Method:
        from paceline.train.reduce.exact import Exact  # which is made for what is here

        return Exact(self.line(), little=self._is_little, directly=self._of_two)

    @property
    def _is_little(self) -> bool:
        """Whether ranks average this model's gradients directly, whatever their buckets."""
        group = self._model.process_group
        return self._on_cpus and small_messages.pays(self.nbytes, self._comms.world.size, group)

    @property
    def _of_two(self) -> bool:
        """Whether two ranks send each other all they have; in a probe they do as more would."""
        over_gloo = self._on_cpus and "gloo" in dist.get_backend(self._model.process_group)
        return over_gloo and self._comms.world.size == 2 and not os.environ.get(jobenv.PROBE)

    @property
    def _on_cpus(self) -> bool:
        return self._stream is None and not self._comms.mixed

    def stood(self, began: Any, ended: Any) -> None:
        """The computing thread stood still for other ranks between these moments."""
        self._model.stood.append((began, ended))

    def moment(self) -> Any:
        """This moment, of the clock by which :meth:`stood` is told."""
        return self._model.mark()

    @property
    def _may_end(self) -> bool:
        """Whether ranks may be lost while DDP waits: it waits for promises then."""
        return self._model.recovery is not None and self._stream is None

    def _hook(self) -> None:
        ours = self._method or self._directly
        if ours is not None and self._stream is None and self._mover is None:
            self._mover = _Mover()
        if self._hooked is self._model.reducer or not (ours or self._may_end):
            return
        self._model.register_comm_hook(self, _on_bucket)
        self._hooked = self._model.reducer

    def take(self, given: GradBucket) -> Future[Tensor]:
        """Begins the exchange of a bucket of DDP's; the future holds the mean."""
        method = self._method or self._directly
        if method is None:
            return self._as_ddp(given.buffer())
        owners = cast(list[nn.Parameter], given.parameters())
        flat, parts = given.buffer(), given.gradients()
        bucket = Bucket(given.index(), flat, owners, parts, given.is_last())
        if self._mover is None:
            return self._on_stream(bucket)
        return self._mover.average(method, bucket)

    def _as_ddp(self, flat: Tensor) -> Future[Tensor]:
        """By DDP's own exact way, to the bit."""
        group = self._model.process_group
        flat.mul_(1.0 / dist.get_world_size(group))
        return waits.promised(dist.all_reduce(flat, group=group, async_op=True), flat)

    def _on_stream(self, bucket: Bucket) -> Future[Tensor]:
        """The host only says what is to be done, in the right order; the device does it."""
        assert self._method is not None
        assert self._stream is not None
        device = bucket.flat.device
        future: Future[Tensor] = Future(devices=[device])
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        with self._stream:
            bucket.flat.record_stream(self._stream)
            with torch.no_grad():
                self._method.average(bucket)
            future.set_result(bucket.flat)
        return future

    def leave_group(self) -> None:
        """Ends this exchange's own connections, whose threads would else stay; by all ranks.

        DDP's reducer goes on to hold this object, which nobody uses any more.
        """
        group, self._group = self._group, None
        self._method = self._directly = self.left = None
        ours = group is not None and group is not _get_default_group()
        if ours and self._stream is None and not self._comms.stale:
            direct.leave(group)
            dist.destroy_process_group(group)

    def close(self) -> None:
        """Ends the mover's thread; no backward pass may be running."""
        if self._mover is not None:
            self._mover.close()


def _on_bucket(exchange: Exchange, bucket: GradBucket) -> Future[Tensor]:
    return exchange.take(bucket)


# DDP looks at these, and does not understand those of postponed evaluation.
_on_bucket.__annotations__ = {"bucket": GradBucket, "return": Future[Tensor]}


class _Mover:
    """The thread that averages buckets, one after the other."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Method, Bucket, Future[Tensor]] | None]
        self._waiting = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="gradients", daemon=True)
        # In it torch is to have no further threads: those that compute would keep them waiting.
        # That is a thread's own number, but also the one that later threads begin with.
        usual, self._alone = torch.get_num_threads(), threading.Event()
        self._thread.start()
        self._alone.wait()
        torch.set_num_threads(usual)

    def average(self, method: Method, bucket: Bucket) -> Future[Tensor]:
        """Has the bucket averaged when its turn comes; the future holds the mean, or the error."""
        mean: Future[Tensor] = Future()
        self._waiting.put((method, bucket, mean))
        return mean

    def _work(self) -> None:
        torch.get_num_threads()  # or torch would begin later with what holds for others
        torch.set_num_threads(1)
        self._alone.set()
        while (job := self._waiting.get()) is not None:
            method, bucket, mean = job
            try:
                with torch.no_grad():
                    method.average(bucket)
                mean.set_result(bucket.flat)
            except Exception as error:  # raised by who waits for it
                mean.set_exception(error)  # type: ignore[arg-type]
            del job, method, bucket, mean  # none is held while waiting for the next

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()


def lay_out(
    model: Replica,
    size: int,
    first: int,
    *,
    as_made: bool = False,
    made: Callable[[], None] = lambda: None,
) -> None:
    """Gives a replica new buckets, without communication unless ``as_made``.

    DDP makes its buckets when it is made, all in one, and again after the first backward pass; it
    has no way to make them later. But its own helper makes a new reducer, as it does for a model
    that was unpickled.

    Args:
        model: Between two steps; it has no gradients.
        size: Bytes of a bucket, at least.
        first: Bytes of the bucket that is full first.
        as_made: Each gradient is to lie where it does when a replica is made with these sizes;
            for that gradients of zero are exchanged, as they are then.
        made: Called when the new reducer is made, before it is used.
    """
    with model.as_made():
        parameters, sparse = model._build_params_for_reducer()  # type: ignore[no-untyped-call]
        names = model._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
        for one in parameters:
            one.grad = None
        model.bucket_bytes_cap, model.bucket_bytes_cap_default = size, True
        torch_dist: Any = dist  # what is replaced here for a moment is not public
        assign, usual = torch_dist._compute_bucket_assignment_by_size, _first_by_default()

        def backwards(
            tensors: list[Tensor], limits: list[int], *rest: Any
        ) -> tuple[list[list[int]], list[int]]:
            # Gradients come in reverse order, and the first bucket is counted from there.
            order = range(len(tensors) - 1, -1, -1)
            found, sizes = assign(tensors[::-1], [first, size], *[one[::-1] for one in rest])
            return [[order[at] for at in one] for one in reversed(found)], sizes[::-1]

        model.reducer = model.logger = None  # type: ignore[assignment]  # takes its own hooks away
        if not as_made:
            torch_dist._compute_bucket_assignment_by_size = backwards
        torch_dist._DEFAULT_FIRST_BUCKET_BYTES = first
        config = getattr(model, "_bucket_config", None)  # from torch 2.13 on
        if config is not None:
            model._bucket_config = type(config)(size, (), first)
        try:
            model._ddp_init_helper(parameters, sparse, names, model.static_graph)  # type: ignore[no-untyped-call]
        finally:
            torch_dist._compute_bucket_assignment_by_size = assign
            torch_dist._DEFAULT_FIRST_BUCKET_BYTES = usual
        # The reducer has its sizes. torch's compiler reads this one, to divide its graphs, and has
        # none below the usual first bucket's.
        model.bucket_bytes_cap = max(size, usual)
        model._has_rebuilt_buckets = False
        made()
        if as_made:
            settle_buckets(model)


def usual_buckets(parameters: Iterable[Tensor], *, over_gloo: bool) -> tuple[int, int]:
    """Bytes of a bucket and of the first, as a replica is made with in the present world."""
    size = bucket_megabytes(parameters) if over_gloo else None
    if size is None:
        return _DEFAULT, _first_by_default()
    return int(size * (1 << 20)), int(size * (1 << 20))


_DEFAULT = 25 << 20
"""Bytes of a bucket where DDP chooses."""


def _first_by_default() -> int:
    return int(dist._DEFAULT_FIRST_BUCKET_BYTES)  # type: ignore[attr-defined]


def _timeout(group: dist.ProcessGroup) -> Any:
    """That of the job's collectives; ``None`` where it cannot be known."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    return getattr(options, "_timeout", None)
