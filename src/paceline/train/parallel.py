"""How a model trains on all ranks at once: replicated (DDP) or sharded (FSDP2)."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.utils import _verify_param_shape_across_processes
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.spec import jobenv
from paceline.spec.errors import JobError, SettingError
from paceline.train import compiler
from paceline.train.comms import Comms
from paceline.train.elastic import waits
from paceline.train.elastic.recovery import Recovery

_NAMED = 5  # parameters in a message, at most
_BUCKETS = 16  # of a large model's gradients: what cannot be hidden is about one of them


def sharded(module: nn.Module) -> nn.Module:
    """The module with its parameters spread over all ranks, in place.

    Every block of a ``ModuleList`` becomes a unit of its own, so that only one block's whole
    parameters are in memory at a time.
    """
    from torch.distributed.fsdp import fully_shard

    for child in module.modules():
        if isinstance(child, nn.ModuleList):
            for block in child:
                fully_shard(block)
    fully_shard(module)
    return module


def is_sharded(module: nn.Module) -> bool:
    """True when parameters are spread over the ranks: all, or those of a part."""
    if "torch.distributed.fsdp" not in sys.modules:  # importing it only to say no takes long
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(one, FSDPModule) for one in module.modules())


def put_back(module: nn.Module) -> None:
    """After an evaluation FSDP still holds whole parameters, which are not the optimizer's."""
    if not is_sharded(module):
        return
    from torch.distributed.fsdp import FSDPModule

    for one in module.modules():
        if isinstance(one, FSDPModule):
            one.reshard()


class Replica(DistributedDataParallel):
    """DDP that keeps how long it stood still for buffers, and sends none that nobody reads.

    Before each forward pass rank 0 sends its buffers to all, and a rank that is early waits there
    for a late one, not after its backward pass. Two sorts stay at home: those of frozen parts,
    which are in evaluation mode and have no parameter that is trained; and the running statistics
    of norms that train, which such a pass only writes. These are sent before a pass that reads
    them, and whenever ranks are compared (``elastic/replica_check.py``).

    Attributes:
        stood: Beginnings and ends of these exchanges; whoever reads them clears them.
        mark: Gives a moment: of the CPU, or of an accelerator's stream.
        recovery: What makes good that a rank is lost; ``None``: nothing does.
        exchanged: The parameters whose gradients are averaged: those that were trained when this
            was made or later (:meth:`widen`), also while a script has frozen some of them.
        some_idle: Says whether some rank has nothing to compute in this step. It does not know how
            often the others call the model, so buffers are sent once in such a step.
    """

    mark: Callable[[], Any] = staticmethod(time.perf_counter)
    recovery: Recovery | None = None
    some_idle: Callable[[], bool] = staticmethod(lambda: False)
    _touches = _sent = False

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.stood: deque[tuple[Any, Any]] = deque(maxlen=1000)
        self.exchanged = [one for one in self.module.parameters() if one.requires_grad]
        self._kept_back: set[nn.Module] = set()  # whose statistics differ between ranks

    @property
    def thawed(self) -> bool:
        """Whether parameters are trained by now whose gradients are not averaged."""
        known = {*map(id, self.exchanged)}
        return any(one.requires_grad and id(one) not in known for one in self.module.parameters())

    def widen(self) -> None:
        """Counts those among the exchanged ones; buckets are to be laid out anew then."""
        known = {*map(id, self.exchanged)}
        every = self.module.parameters()
        self.exchanged = [one for one in every if one.requires_grad or id(one) in known]

    @contextmanager
    def as_made(self) -> Iterator[None]:
        """Within it exactly those parameters are trained whose gradients are averaged."""
        every = [*self.module.parameters()]
        now, made = [one.requires_grad for one in every], {*map(id, self.exchanged)}
        for one in every:
            one.requires_grad_(id(one) in made)
        try:
            yield
        finally:
            for one, trained in zip(every, now, strict=True):
                one.requires_grad_(trained)

    def aligned(self) -> None:
        """All ranks have the same buffers now."""
        self._kept_back.clear()

    def touched(self) -> Tensor:
        """A loss whose gradients are zero, after what a forward pass sends but without computing.

        For a rank that has nothing to compute while the others wait for its gradients.
        """
        self._touches = True
        try:
            return cast(Tensor, self(None))  # on a device DDP fails where there is no input
        finally:
            self._touches = False

    def check_used(self) -> None:
        """To be called after a backward pass that exchanges gradients, before anything else does.

        DDP goes on without a word on a rank whose pass has left a parameter out, and still waits
        for it on the others: the next collective would meet that, and end a rank by a signal.

        Raises:
            JobError: Names the parameters.
        """
        if self.find_unused_parameters or all(one.grad is not None for one in self.exchanged):
            return
        exchanged = {*map(id, self.exchanged)}
        named = self.module.named_parameters()
        left = [name for name, one in named if one.grad is None and id(one) in exchanged]
        more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        raise JobError(
            "some parameters got no gradient in a step, and the ranks wait for all of them",
            found=f"the loss does not depend on {', '.join(left[:_NAMED])}{more}",
            remedy="session.prepare(…, unused=True) where a step may leave out parts of the model;"
            " what no step uses: remove it, or freeze it before session.prepare",
        )

    def _run_ddp_forward(self, *inputs: Any, **named: Any) -> Any:
        if self._touches:
            return _Touch([one for one in self.module.parameters() if one.requires_grad])()
        return super()._run_ddp_forward(*inputs, **named)  # type: ignore[no-untyped-call]

    def _pre_forward(self, *inputs: Any, **named: Any) -> Any:
        """Sends buffers. Where a rank is lost the pass is one of the module alone: its batch does
        not count, but a script is not to see an error."""
        if self.recovery is None:
            return super()._pre_forward(*inputs, **named)  # type: ignore[no-untyped-call]
        if not self.recovery.stale:
            try:
                with self.recovery.span:
                    return super()._pre_forward(*inputs, **named)  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                self.recovery.recover_forward(error)
        return inputs, named

    def _post_forward(self, output: Any) -> Any:
        if self.recovery is not None and self.recovery.stale:
            return output
        return super()._post_forward(output)  # type: ignore[no-untyped-call]

    def _moving_and_read(self) -> Iterator[Tensor]:
        """The buffers that training may have changed and the next forward pass may read."""
        for part in self.module.modules():
            if _only_writes(part):
                self._kept_back.add(part)
            elif part in self._kept_back or _moves(part):
                self._kept_back.discard(part)
                yield from part.buffers(recurse=False)

    def will_sync_module_buffers(self) -> bool:
        if self.some_idle():
            self.require_forward_param_sync = not self._sent
        return bool(super().will_sync_module_buffers())  # type: ignore[no-untyped-call]

    def begin_step(self) -> None:
        """What follows belongs to another step, or to the same one from its beginning."""
        if self.some_idle():  # whatever DDP goes by next, it is the same on all ranks
            self.require_forward_param_sync = True
        self._sent = False

    def _sync_buffers(self) -> None:
        began, self._sent = self.mark(), True
        super()._sync_buffers()  # type: ignore[no-untyped-call]
        self.stood.append((began, self.mark()))

    def _distributed_broadcast_coalesced(
        self, tensors: list[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        moving = {id(buffer) for buffer in self._moving_and_read()}
        found = [tensor for tensor in tensors if id(tensor) in moving]
        if not found:
            return
        send = super()._distributed_broadcast_coalesced
        if self.recovery is None or found[0].device.type != "cpu":
            send(found, buffer_size, authoritative_rank)  # type: ignore[no-untyped-call]
        else:
            waits.wait_in_thread(lambda: send(found, buffer_size, authoritative_rank))  # type: ignore[no-untyped-call]


def moving_buffers(module: nn.Module) -> list[Tensor]:
    """The buffers that training may change: none of frozen parts in evaluation mode."""
    return [
        buffer
        for part in module.modules()
        if _moves(part)
        for buffer in part.buffers(recurse=False)
    ]


def _moves(part: nn.Module) -> bool:
    return part.training or any(p.requires_grad for p in part.parameters())


def _only_writes(part: nn.Module) -> bool:
    """Whether a forward pass uses the batch's own statistics and notes them for evaluations."""
    return part.training and type(part).forward in _NOTING and not part._buffers.keys() - _NOTED


_NOTING = (
    nn.modules.batchnorm._BatchNorm.forward,
    nn.modules.instancenorm._InstanceNorm.forward,
    nn.SyncBatchNorm.forward,
)
_NOTED = {"running_mean", "running_var", "num_batches_tracked"}


class Apart(Replica):
    """DDP for one of several models: a forward pass promises no backward pass.

    A discriminator is called for its own loss and for the generator's. DDP takes each forward pass
    for the beginning of a backward pass that is to be exchanged, in pieces of a batch, too, and
    sends buffers before each of them. This one exchanges when it is told (:meth:`expect`), and
    leaves buffers alone: ``elastic/replica_check.py`` makes them equal.
    """

    def forward(self, *inputs: Any, **named: Any) -> Any:
        with self.no_sync():
            return super().forward(*inputs, **named)  # type: ignore[no-untyped-call]

    def expect(self, loss: Tensor) -> None:
        """The next backward pass is that of this loss, and exchanges gradients."""
        if self.recovery is not None and self.recovery.stale:
            return
        self.reducer.prepare_for_backward([loss] if self.find_unused_parameters else [])


def replicated(
    module: nn.Module,
    device: torch.device,
    comms: Comms,
    *,
    unused: bool = False,
    apart: bool = False,
    recovery: Recovery | None = None,
) -> Replica:
    """The module under DDP: gradients are averaged over all ranks.

    Args:
        module: On its device.
        device: Of this rank.
        comms: By which all ranks get the first rank's parameters and buffers.
        unused: Some steps leave parameters unused; looking for them costs time at every step.
        apart: It is one of several models that are trained together.
        recovery: What makes good that a rank is lost; ``None``: nothing does.
    """
    index = None if device.type == "cpu" else [device]
    over_gloo = comms.device.type == "cpu"  # alike on every rank
    # A false alarm of DDP for weights with one input channel, whose strides are ambiguous.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view")
    # As DDP begins, but not by a tree.
    parameters: list[Tensor] = [one for one in module.parameters() if one.requires_grad]
    _verify_param_shape_across_processes(_get_default_group(), parameters)
    megabytes = bucket_megabytes(parameters) if over_gloo else None
    comms.spread([*module.parameters(), *module.buffers()])
    with compiler.unasked():
        model = (Apart if apart else Replica)(
            module,
            device_ids=index,
            init_sync=False,
            bucket_cap_mb=megabytes,
            gradient_as_bucket_view=True,
            find_unused_parameters=unused,
        )
    model.broadcast_buffers = not apart
    settle_buckets(model)
    model.recovery = recovery
    return model


def check_dense(module: nn.Module) -> None:
    """Refuses models whose gradients have another form than buckets of real numbers.

    Raises:
        SettingError: Names the part.
    """
    for name, part in module.named_modules():
        if getattr(part, "sparse", False) and isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            raise SettingError(
                "session.prepare: gradients of several ranks are averaged as dense tensors only",
                found=f"{type(part).__name__}(sparse=True) in {name or 'the model'}",
                remedy="make it with sparse=False; it then needs an optimizer for dense gradients",
            )
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise SettingError(
                "session.prepare: gradients of several ranks are averaged as real numbers only",
                found=f"{name} is {str(parameter.dtype).removeprefix('torch.')}",
                remedy="keep real and imaginary part as one real parameter, and take"
                " torch.view_as_complex of it in the forward pass",
            )


def check_held(module: nn.Module, optimizer: Optimizer) -> None:
    """Refuses an optimizer of parameters that are not the module's: nobody averages those.

    Raises:
        SettingError: Says how many.
    """
    held = {id(one) for one in module.parameters()}
    every = [one for group in optimizer.param_groups for one in group["params"]]
    strange = [one for one in every if one.requires_grad and id(one) not in held]
    if strange:
        raise SettingError(
            "session.prepare: the optimizer changes parameters that the model does not have:"
            " each rank would train its own",
            found=f"{len(strange)} of {len(every)}, the first of shape {[*strange[0].shape]}",
            remedy="make them part of the model (an attribute that is an nn.Parameter or a module),"
            " or of another one that is prepared with an optimizer of its own",
        )


def bucket_megabytes(parameters: Iterable[Tensor]) -> float | None:
    """The size of all buckets over gloo with three and more ranks; ``None``: DDP's own sizes.

    Given by the parameters alone: where a gradient lies decides in which order the ranks' shares
    are added up, and no result may depend on what was measured. With two ranks it does not matter:
    ``reduce/bucket_size.py`` tries some; but a probe of two is to tell what more will do.
    """
    if dist.get_world_size() < 3 and not os.environ.get(jobenv.PROBE):
        return None
    size = sum(one.nbytes for one in parameters)
    return min(25.0, max(1.0, size / (1 << 20) / _BUCKETS))


def settle_buckets(model: DistributedDataParallel) -> None:
    """Has DDP lay out its buckets for good before the first step.

    After the first backward pass it lays them out anew, and where a gradient lies decides in which
    order the ranks' shares are added up. With more than two ranks a resumed run would
    otherwise make its first step with another layout, so other last bits, than the
    uninterrupted run made that step with.
    """
    module, parameters = model.module, [p for p in model.parameters() if p.requires_grad]
    buffers, model.broadcast_buffers = model.broadcast_buffers, False  # there are none in it
    model.module = _Touch(parameters)
    try:
        touched = model(None)  # on a device DDP fails where there is no input to move
        if isinstance(model, Apart):
            model.expect(touched)
        touched.backward()
    finally:  # a rank may be lost meanwhile
        model.module, model.broadcast_buffers = module, buffers
        for parameter in parameters:
            parameter.grad = None


class _Touch(nn.Module):
    """Uses every parameter once, so that their gradients (zero) come in reverse order."""

    def __init__(self, every: list[nn.Parameter]) -> None:
        super().__init__()
        self._every = every

    def forward(self, *_: None) -> Tensor:
        total = torch.zeros((), device=self._every[0].device)
        for parameter in self._every:
            total = total + parameter.sum() * 0
        return total


def unsynced(model: nn.Module) -> AbstractContextManager[None]:
    """Within it, forward and backward passes keep their gradients to themselves.

    DDP has to know before the forward pass, FSDP before the backward pass.
    """
    if isinstance(model, DistributedDataParallel):
        return model.no_sync()
    if is_sharded(model):
        return _FsdpWithoutSync(model)
    return nullcontext()


class _FsdpWithoutSync(AbstractContextManager[None]):
    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __enter__(self) -> None:
        self._model.set_requires_gradient_sync(False)  # type: ignore[operator]

    def __exit__(self, *error: object) -> None:
        self._model.set_requires_gradient_sync(True)  # type: ignore[operator]


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """The module's whole state by name; with shards a collective, and on the CPU of rank 0."""
    return _module_state(module, whole=True)


def own_state(module: nn.Module) -> dict[str, Tensor]:
    """The module's state by name, each rank's own shards of it (``DTensor``)."""
    return _module_state(module, whole=False)


def _module_state(module: nn.Module, whole: bool) -> dict[str, Tensor]:
    if not is_sharded(module):
        return module.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    put_back(module)
    options = StateDictOptions(full_state_dict=whole, cpu_offload=whole)
    return cast(dict[str, Tensor], get_model_state_dict(module, options=options))


def load_whole_state(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Loads what :func:`whole_state` gave; every rank must hold the whole state."""
    if not is_sharded(module):
        module.load_state_dict(state)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    put_back(module)
    set_model_state_dict(module, dict(state), options=StateDictOptions(full_state_dict=True))


def optimizer_state(
    module: nn.Module, optimizer: Optimizer, *, whole: bool = True
) -> dict[str, Any]:
    """The optimizer's state, with parameters by name instead of by number.

    With shards a collective; ``whole`` on the CPU of rank 0, otherwise each rank's own shards.
    The form is the same.
    """
    if not is_sharded(module):
        return renamed(optimizer.state_dict(), dict(enumerate(_names(module, optimizer))))
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    put_back(module)
    options = StateDictOptions(full_state_dict=whole, cpu_offload=whole)
    return dict(get_optimizer_state_dict(module, optimizer, options=options))


def load_optimizer_state(
    module: nn.Module, optimizer: Optimizer, state: dict[str, Any], *, whole: bool = True
) -> None:
    """Loads what :func:`optimizer_state` gave; every rank must hold what it asked for there."""
    if not is_sharded(module):
        numbers = {name: number for number, name in enumerate(_names(module, optimizer))}
        optimizer.load_state_dict(renamed(state, numbers))
        _lay_out_as_parameters(optimizer)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    put_back(module)
    options = StateDictOptions(full_state_dict=whole)
    set_optimizer_state_dict(module, optimizer, state, options=options)


def is_shard(tensor: Tensor) -> bool:
    """True for a tensor that is spread over the ranks."""
    if "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def whole_tensor(tensor: Tensor) -> Tensor:
    """The tensor as this rank puts it together: a collective for a shard."""
    return cast(Tensor, tensor.full_tensor()) if is_shard(tensor) else tensor  # type: ignore[attr-defined]


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; the same memory. Without gradients."""
    return cast(Tensor, tensor.to_local()) if is_shard(tensor) else tensor  # type: ignore[attr-defined]


def fill_own(own: Tensor, given: Tensor) -> None:
    """Fills what this rank holds from a tensor that is whole or spread as ``own`` is."""
    if is_shard(own) and not is_shard(given):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(own, DTensor)
        there = given.to(own.device)
        given = distribute_tensor(there, own.device_mesh, own.placements, src_data_rank=None)
    own_part(own).copy_(own_part(given))


def _lay_out_as_parameters(optimizer: Optimizer) -> None:
    """Gives each moment its parameter's strides: a file has none, and CUDA's fused kernels check.

    Channels last is what has other strides than a tensor that was read.
    """
    for parameter, kept in optimizer.state.items():
        for name, value in kept.items():
            alike = isinstance(value, Tensor) and value.shape == parameter.shape
            if alike and value.stride() != parameter.stride():
                kept[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _names(module: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names of the optimizer's parameters, in its order."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    return [names.get(id(one), f"#{number}") for number, one in enumerate(parameters)]


def renamed(state: dict[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """An optimizer's state with every parameter's key replaced."""
    groups = [
        {**group, "params": [names[key] for key in group["params"]]}
        for group in state["param_groups"]
    ]
    kept = {names[key]: value for key, value in state["state"].items()}
    return {**state, "state": kept, "param_groups": groups}
