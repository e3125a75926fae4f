"""Replicates (DDP) or shards (FSDP2) a model over all ranks, and handles its state."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
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
from paceline.train.elastic.recovery import Activity, Recovery

_MAX_NAMED_PARAMETERS = 5  # in a message
_NUM_BUCKETS = 16  # of a large model: about one bucket cannot be hidden behind the backward pass


def shard(module: nn.Module) -> nn.Module:
    """Spreads the module's parameters over all ranks, in place.

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
    """Whether parameters are spread over the ranks, all or those of a submodule."""
    if "torch.distributed.fsdp" not in sys.modules:  # importing it only to say no takes long
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(part, FSDPModule) for part in module.modules())


def reshard(module: nn.Module) -> None:
    """Frees the gathered parameters that FSDP still holds after an evaluation."""
    if not is_sharded(module):
        return
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


class Replica(DistributedDataParallel):
    """DDP that times its waits for buffers, and does not send buffers that nothing reads.

    Before each forward pass rank 0 sends its buffers to all, and a rank that is early waits there
    for a late one, not after its backward pass. Two kinds are not sent: buffers of frozen parts,
    which are in evaluation mode and have no parameter that is trained; and the running statistics
    of norms in training mode, which such a pass only writes. These are sent before a pass that
    reads them, and whenever ranks are compared (``elastic/replica_check.py``).

    Attributes:
        stalls: Start and end of each wait; the reader clears them.
        timestamp: Returns a timestamp of the CPU, or of an accelerator's stream.
        recovery: Replaces lost ranks; ``None``: nothing does.
        exchanged: The parameters whose gradients are averaged: those that were trained when this
            was made or at :meth:`include_trained`, also if a script has frozen them since.
        has_idle_rank: Returns whether some rank has nothing to compute in this step. Buffers are
            then sent once, as it does not know how often the others call the model.
    """

    timestamp: Callable[[], Any] = staticmethod(time.perf_counter)
    recovery: Recovery | None = None
    has_idle_rank: Callable[[], bool] = staticmethod(lambda: False)
    _is_touching = _buffers_sent = False

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.stalls: deque[tuple[Any, Any]] = deque(maxlen=1000)
        self.exchanged = {p for p in self.module.parameters() if p.requires_grad}
        self._unsent_statistics: set[nn.Module] = set()  # whose statistics differ between ranks

    @property
    def has_new_parameters(self) -> bool:
        """Whether parameters are trained by now whose gradients are not averaged."""
        parameters = self.module.parameters()
        return any(p.requires_grad and p not in self.exchanged for p in parameters)

    def include_trained(self) -> None:
        """Adds newly trained parameters to :attr:`exchanged`; rebuild the buckets afterwards.

        Parameters that the script has replaced are removed.
        """
        parameters = self.module.parameters()
        self.exchanged = {p for p in parameters if p.requires_grad or p in self.exchanged}

    def mark_synchronized(self) -> None:
        self._unsent_statistics.clear()

    def zero_loss(self) -> Tensor:
        """Returns a loss with zero gradients without running the model.

        For a rank that has nothing to compute while the others wait for its gradients.
        """
        self._is_touching = True
        try:
            return cast(Tensor, self(None))  # on a device DDP fails where there is no input
        finally:
            self._is_touching = False

    def check_used(self) -> None:
        """Checks, after a backward pass, that every averaged parameter got a gradient.

        On a rank whose pass left a parameter out, DDP goes on silently; on the others it waits for
        that parameter. The next collective would mismatch and end a rank by a signal.

        Raises:
            JobError: Names the parameters.
        """
        if self.find_unused_parameters or all(p.grad is not None for p in self.exchanged):
            return
        parameters = self.module.named_parameters()
        unused = [name for name, p in parameters if p.grad is None and p in self.exchanged]
        num_omitted = len(unused) - _MAX_NAMED_PARAMETERS
        omitted = f" and {num_omitted} more" if num_omitted > 0 else ""
        raise JobError(
            "some parameters got no gradient in a step, and the ranks wait for all of them",
            found="the loss does not depend on"
            f" {', '.join(unused[:_MAX_NAMED_PARAMETERS])}{omitted}",
            remedy="session.prepare(…, unused=True) where a step may leave out parts of the model;"
            " what no step uses: remove it, or freeze it before session.prepare",
        )

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._is_touching:
            return _Touch([p for p in self.module.parameters() if p.requires_grad])()
        return super()._run_ddp_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Sends buffers. If a rank is lost, the pass runs without DDP: its batch does not count,
        and the script sees no error."""
        if self.recovery is None:
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        if not self.recovery.stale:
            try:
                with self.recovery.span:
                    return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                self.recovery.regroup(error, Activity.FORWARD)  # its batch is void
            except IndexError:  # DDP makes buckets of what an aborted broadcast has left
                try:
                    self.recovery.wait_for_device()
                except RuntimeError as error:
                    self.recovery.regroup(error, Activity.FORWARD)
                else:
                    raise
        return inputs, kwargs

    def _post_forward(self, output: Any) -> Any:
        if self.recovery is not None and self.recovery.stale:
            return output
        return super()._post_forward(output)  # type: ignore[no-untyped-call]

    def _read_buffers(self) -> Iterator[Tensor]:
        """Yields buffers that training may have changed and the next forward pass may read."""
        for part in self.module.modules():
            if _only_writes_statistics(part):
                self._unsent_statistics.add(part)
            elif part in self._unsent_statistics or _is_trained(part):
                self._unsent_statistics.discard(part)
                yield from part.buffers(recurse=False)

    def will_sync_module_buffers(self) -> bool:
        if self.has_idle_rank():
            self.require_forward_param_sync = not self._buffers_sent
        return bool(super().will_sync_module_buffers())  # type: ignore[no-untyped-call]

    def start_step(self) -> None:
        """Prepares for another step, or for the same one again."""
        if self.has_idle_rank():  # the same on all ranks
            self.require_forward_param_sync = True
        self._buffers_sent = False

    def _sync_buffers(self) -> None:
        start, self._buffers_sent = self.timestamp(), True
        super()._sync_buffers()  # type: ignore[no-untyped-call]
        self.stalls.append((start, self.timestamp()))

    def _distributed_broadcast_coalesced(
        self, tensors: list[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        read_ids = {id(buffer) for buffer in self._read_buffers()}
        selected = [tensor for tensor in tensors if id(tensor) in read_ids]
        if not selected:
            return
        send = super()._distributed_broadcast_coalesced
        uses_gloo = "gloo" in dist.get_backend(self.process_group)
        if self.recovery is None or selected[0].device.type != "cpu" or not uses_gloo:
            send(selected, buffer_size, authoritative_rank)  # type: ignore[no-untyped-call]
        else:
            waits.wait_in_thread(lambda: send(selected, buffer_size, authoritative_rank))  # type: ignore[no-untyped-call]


def trained_buffers(module: nn.Module) -> list[Tensor]:
    """Returns buffers that training may change, so none of frozen parts in evaluation mode."""
    return [
        buffer
        for part in module.modules()
        if _is_trained(part)
        for buffer in part.buffers(recurse=False)
    ]


def _is_trained(part: nn.Module) -> bool:
    return part.training or any(p.requires_grad for p in part.parameters())


def _only_writes_statistics(part: nn.Module) -> bool:
    """Whether a forward pass only writes the running statistics, for evaluations."""
    return (
        part.training
        and type(part).forward in _STATISTICS_FORWARDS
        and not part._buffers.keys() - _STATISTICS
    )


_STATISTICS_FORWARDS = (
    nn.modules.batchnorm._BatchNorm.forward,
    nn.modules.instancenorm._InstanceNorm.forward,
    nn.SyncBatchNorm.forward,
)
_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}


class ManualReplica(Replica):
    """DDP for one of several models, which exchanges gradients only after :meth:`expect`.

    A discriminator is called for its own loss and for the generator's. DDP prepares an exchange in
    each forward pass and sends buffers before it, also for a part of a batch. This class does
    neither: :meth:`expect` prepares the exchange, ``elastic/replica_check.py`` aligns buffers.
    """

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self.no_sync():
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def expect(self, loss: Tensor) -> None:
        """Prepares the gradient exchange of this loss's backward pass, which comes next."""
        if self.recovery is not None and self.recovery.stale:
            return
        self.reducer.prepare_for_backward([loss] if self.find_unused_parameters else [])


def replicate(
    module: nn.Module,
    device: torch.device,
    comms: Comms,
    *,
    unused: bool = False,
    manual: bool = False,
    recovery: Recovery | None = None,
) -> Replica:
    """Wraps the module in DDP, which averages gradients over all ranks.

    Args:
        comms: Collectives that broadcast rank 0's parameters and buffers.
        unused: Some steps leave parameters unused; looking for them costs time at every step.
        manual: The module is one of several models that are trained together.
        recovery: Replaces lost ranks; ``None``: nothing does.
    """
    index = None if device.type == "cpu" else [device]
    uses_gloo = comms.device.type == "cpu"  # the same on every rank
    # A false alarm of DDP for weights with one input channel, whose strides are ambiguous.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view")
    # As DDP's constructor does, but without its tree broadcast.
    parameters: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
    _verify_param_shape_across_processes(_get_default_group(), parameters)
    megabytes = bucket_megabytes(parameters) if uses_gloo else None
    comms.broadcast([*module.parameters(), *module.buffers()])
    with compiler.placeholder_dynamo():
        model = (ManualReplica if manual else Replica)(
            module,
            device_ids=index,
            init_sync=False,
            bucket_cap_mb=megabytes,
            gradient_as_bucket_view=True,
            find_unused_parameters=unused,
        )
    model.broadcast_buffers = not manual
    build_buckets(model)
    model.recovery = recovery
    return model


def check_dense(module: nn.Module, asked: str = "session.prepare") -> None:
    """Refuses models with sparse or complex gradients, which buckets cannot hold.

    Args:
        asked: Whose averaging cannot be, for the message.

    Raises:
        SettingError: There is one; names the module or parameter.
    """
    for name, part in module.named_modules():
        if getattr(part, "sparse", False) and isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            raise SettingError(
                f"{asked}: gradients of several ranks are averaged as dense tensors only",
                found=f"{type(part).__name__}(sparse=True) in {name or 'the model'}",
                remedy="make it with sparse=False; it then needs an optimizer for dense gradients",
            )
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise SettingError(
                f"{asked}: gradients of several ranks are averaged as real numbers only",
                found=f"{name} is {str(parameter.dtype).removeprefix('torch.')}",
                remedy="keep real and imaginary part as one real parameter, and take"
                " torch.view_as_complex of it in the forward pass",
            )


def check_optimizer(module: nn.Module, optimizer: Optimizer) -> None:
    """Refuses an optimizer with parameters that the module does not have: they are not averaged.

    Raises:
        SettingError: There are such parameters.
    """
    module_ids = {id(parameter) for parameter in module.parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    unknown = [p for p in parameters if p.requires_grad and id(p) not in module_ids]
    if unknown:
        raise SettingError(
            "session.prepare: the optimizer changes parameters that the model does not have:"
            " each rank would train its own",
            found=f"{len(unknown)} of {len(parameters)}, the first of shape {[*unknown[0].shape]}",
            remedy="make them part of the model (an attribute that is an nn.Parameter or a module),"
            " or of another one that is prepared with an optimizer of its own",
        )


def bucket_megabytes(parameters: Iterable[Tensor]) -> float | None:
    """Returns the bucket size for gloo in MiB; ``None``: DDP's own size.

    It depends on the parameters alone. The position of a gradient decides in which order the ranks'
    shares are added, and no result may depend on measured times. With two ranks the order does not
    matter, and ``reduce/bucket_size.py`` tries some sizes; a probe of two ranks stands for more.
    """
    if dist.get_world_size() < 3 and not os.environ.get(jobenv.PROBE):
        return None
    size = sum(parameter.nbytes for parameter in parameters)
    return min(25.0, max(1.0, size / (1 << 20) / _NUM_BUCKETS))


def build_buckets(model: DistributedDataParallel) -> None:
    """Makes DDP build its final buckets before the first step.

    After the first backward pass DDP lays its buckets out anew, which changes the order in which
    the ranks' shares are added. Without this, with more than two ranks, a resumed run would make
    its first step with another layout than the uninterrupted run, so with other last bits.
    """
    module, parameters = model.module, [p for p in model.parameters() if p.requires_grad]
    buffers, model.broadcast_buffers = model.broadcast_buffers, False  # there are none in it
    model.module = _Touch(parameters)
    try:
        touched = model(None)  # on a device DDP fails where there is no input to move
        if isinstance(model, ManualReplica):
            model.expect(touched)
        touched.backward()
    finally:  # a rank may be lost meanwhile
        model.module, model.broadcast_buffers = module, buffers
        for parameter in parameters:
            parameter.grad = None


@contextmanager
def only_trained(model: nn.Module, trained: Collection[nn.Parameter]) -> Iterator[None]:
    """Context in which exactly these parameters of a model require gradients."""
    parameters = [*model.parameters()]
    required_grad = [parameter.requires_grad for parameter in parameters]
    for parameter in parameters:
        parameter.requires_grad_(parameter in trained)
    try:
        yield
    finally:
        for parameter, requires_grad in zip(parameters, required_grad, strict=True):
            parameter.requires_grad_(requires_grad)


class _Touch(nn.Module):
    """Uses every parameter once, so that zero gradients come in reverse order."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._used_parameters = parameters

    def forward(self, *_: None) -> Tensor:
        total = torch.zeros((), device=self._used_parameters[0].device)
        for parameter in self._used_parameters:
            total = total + parameter.sum() * 0
        return total


@contextmanager
def unsynced(model: nn.Module) -> Iterator[None]:
    """Context of passes that do not exchange gradients.

    DDP has to know before the forward pass, FSDP before the backward pass.
    """
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif is_sharded(model):
        model.set_requires_gradient_sync(False)  # type: ignore[operator]
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)  # type: ignore[operator]
    else:
        yield


def full_state(module: nn.Module) -> dict[str, Tensor]:
    """Returns the whole state by name; with shards a collective, on the CPU of rank 0."""
    return _module_state(module, assemble=True)


def local_state(module: nn.Module) -> dict[str, Tensor]:
    """Returns the state by name, each rank's own shards of it (``DTensor``)."""
    return _module_state(module, assemble=False)


def _module_state(module: nn.Module, assemble: bool) -> dict[str, Tensor]:
    if not is_sharded(module):
        return module.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    reshard(module)
    options = StateDictOptions(full_state_dict=assemble, cpu_offload=assemble)
    return cast(dict[str, Tensor], get_model_state_dict(module, options=options))


def load_full_state(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Loads a state of :func:`full_state`; every rank must hold all of it."""
    if not is_sharded(module):
        module.load_state_dict(state)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    reshard(module)
    set_model_state_dict(module, dict(state), options=StateDictOptions(full_state_dict=True))


def optimizer_state(
    module: nn.Module, optimizer: Optimizer, *, assemble: bool = True
) -> dict[str, Any]:
    """Returns the optimizer's state, with parameters by name instead of by number.

    With shards it is a collective: with ``assemble`` the whole state is on the CPU of rank 0,
    otherwise each rank has its own shards, in the same form.
    """
    if not is_sharded(module):
        return rename_parameters(
            optimizer.state_dict(), dict(enumerate(_parameter_names(module, optimizer)))
        )
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    reshard(module)
    options = StateDictOptions(full_state_dict=assemble, cpu_offload=assemble)
    return dict(get_optimizer_state_dict(module, optimizer, options=options))


def load_optimizer_state(
    module: nn.Module, optimizer: Optimizer, state: dict[str, Any], *, assemble: bool = True
) -> None:
    """Loads a state of :func:`optimizer_state`; every rank must hold what it returned there."""
    if not is_sharded(module):
        numbers = {name: number for number, name in enumerate(_parameter_names(module, optimizer))}
        optimizer.load_state_dict(rename_parameters(state, numbers))
        _match_parameter_strides(optimizer)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    reshard(module)
    options = StateDictOptions(full_state_dict=assemble)
    set_optimizer_state_dict(module, optimizer, state, options=options)


def is_shard(tensor: Tensor) -> bool:
    if "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def full_tensor(tensor: Tensor) -> Tensor:
    return cast(Tensor, tensor.full_tensor()) if is_shard(tensor) else tensor  # type: ignore[attr-defined]


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor, sharing its memory; not differentiable."""
    return cast(Tensor, tensor.to_local()) if is_shard(tensor) else tensor  # type: ignore[attr-defined]


def fill_local(target: Tensor, source: Tensor) -> None:
    """Copies a tensor, whole or sharded like ``target``, into this rank's part of ``target``."""
    if is_shard(target) and not is_shard(source):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(target, DTensor)
        moved = source.to(target.device)
        source = distribute_tensor(moved, target.device_mesh, target.placements, src_data_rank=None)
    local_tensor(target).copy_(local_tensor(source))


def _match_parameter_strides(optimizer: Optimizer) -> None:
    """Gives moments their parameters' strides (channels last), as CUDA's fused kernels require."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            is_moment = isinstance(value, Tensor) and value.shape == parameter.shape
            if is_moment and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _parameter_names(module: nn.Module, optimizer: Optimizer) -> list[str]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [names.get(id(parameter), f"#{number}") for number, parameter in enumerate(parameters)]


def rename_parameters(state: dict[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns an optimizer's state with every parameter's key replaced."""
    groups = [
        {**group, "params": [names[key] for key in group["params"]]}
        for group in state["param_groups"]
    ]
    renamed_state = {names[key]: value for key, value in state["state"].items()}
    return {**state, "state": renamed_state, "param_groups": groups}
