"""Late updates: a layer takes its step when its next forward pass asks for its parameters.

After a backward pass most gradients are still on their way. Waiting for them, stepping and going
on with the next forward pass one after the other leaves the network idle for as long as the forward
pass lasts. But its first layer needs only its own parameters: so each bucket is stepped when one
of its parameters is next read, and until then its bytes travel beside what is computed.

The numbers are those of one step for all, bit by bit, because these optimizers treat each element
by itself. Whoever reads parameters through their module sees them stepped, whatever the reason.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

ELEMENTWISE = (SGD, Adam, AdamW, RMSprop, Adagrad)
"""Each element's new value depends on nothing but its own gradient and state."""

_COMPILED = "compiled code reads parameters where it cannot be seen"
_HIDDEN = (nn.RNNBase, torch.jit.ScriptModule)  # they keep their parameters in other places, too


def obstacle(module: nn.Module, optimizer: Optimizer) -> str:
    """Why updates cannot come late; empty where reads are seen and no step needs all at once."""
    for one in module.modules():
        # That of torch.compile is known by its original: its class takes a second to import.
        if "_orig_mod" in one._modules or one._compiled_call_impl is not None:
            return _COMPILED
        seen = type(one._parameters) in (dict, _Watched)
        if not seen or isinstance(one, _HIDDEN):
            return f"a {type(one).__name__} reads its parameters where it cannot be seen"
    if type(optimizer) not in ELEMENTWISE:
        known = ", ".join(one.__name__ for one in ELEMENTWISE)
        return f"{type(optimizer).__name__} may need all gradients at once; {known} do not"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "the optimizer has hooks, which are called for a whole step"
    if any(group.get("capturable") for group in optimizer.param_groups):
        return "the optimizer is capturable"
    settings = [one for group in optimizer.param_groups for one in group.items()]
    if found := [name for name, one in settings if name != "params" and _changes(one)]:
        return f"its {found[0]} is a tensor, which a schedule may change before a step is taken"
    return ""


def _changes(setting: object) -> bool:
    """Whether what an optimizer was set to may become another value in place."""
    parts = setting if isinstance(setting, (tuple, list)) else [setting]
    return any(isinstance(one, Tensor) for one in parts)


class Late:
    """The updates that are still to come.

    Args:
        module: Whose parameters are watched.
        optimizer: Whose steps are taken bucket by bucket.
        stood: Called with the beginning and end of each time in which the computing thread stood
            still for gradients, by ``time.perf_counter``.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, stood: Callable[[float, float], None]
    ) -> None:
        self._module, self._optimizer, self._stood = module, optimizer, stood
        self._lock = threading.RLock()
        self._sent: dict[int, tuple[list[nn.Parameter], Future[Tensor]]] = {}
        self._owed: dict[int, int] = {}  # id of a parameter: its bucket
        self._parts: dict[tuple[int, ...], Optimizer] = {}
        self._groups: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Watches the module's parameters from now on."""
        for one in self._module.modules():
            one.__dict__["_parameters"] = _Watched(one._parameters, self)

    def end(self) -> None:
        """Takes all steps that are left and leaves the module as it was."""
        self.flush()
        for one in self._module.modules():
            if isinstance(one._parameters, _Watched):
                one.__dict__["_parameters"] = one._parameters.plain()

    @property
    def pending(self) -> bool:
        """Buckets are on their way, and the step has not been taken."""
        return bool(self._sent) and not self._owed

    def sent(self, number: int, parameters: list[nn.Parameter], mean: Future[Tensor]) -> None:
        """A bucket is on its way; the future is that of its mean."""
        self._sent[number] = parameters, mean

    def step(self) -> None:
        """In place of the optimizer's step: from now on each bucket takes its own."""
        self._groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        for number, (parameters, _) in self._sent.items():
            self._owed.update((id(one), number) for one in parameters)

    def arrive(self) -> None:
        """Waits for all gradients; the step itself is left to the caller."""
        for _, mean in self._sent.values():
            self._wait(mean)
        self._sent.clear()

    def flush(self) -> None:
        """Takes all steps that are left."""
        with self._lock:
            for number in sorted(set(self._owed.values())):
                self._take(number)

    def asked(self, parameter: Any) -> None:
        """A parameter is about to be read."""
        if self._owed and id(parameter) in self._owed:
            with self._lock:
                if id(parameter) in self._owed:
                    self._take(self._owed[id(parameter)])

    def _take(self, number: int) -> None:
        parameters, mean = self._sent[number]
        self._wait(mean)  # where it fails, it fails at every later read in the same way
        del self._sent[number]
        for one in parameters:
            del self._owed[id(one)]
        self._part(parameters).step()
        for one in parameters:
            one.grad = None

    def _wait(self, mean: Future[Tensor]) -> None:
        began = time.perf_counter()
        mean.wait()
        self._stood(began, time.perf_counter())

    def _part(self, parameters: list[nn.Parameter]) -> Optimizer:
        """The optimizer for these parameters alone, with the settings of the step."""
        key = tuple(map(id, parameters))
        if key not in self._parts:
            part = self._parts[key] = copy.copy(self._optimizer)
            mine = set(key)
            part.param_groups = [
                {**group, "params": [one for one in group["params"] if id(one) in mine]}
                for group in self._optimizer.param_groups
            ]
        part = self._parts[key]
        part.state = self._optimizer.state
        for group, now in zip(part.param_groups, self._groups, strict=True):
            group.update(now)
        return part


class _Watched(dict[str, Any]):
    """A module's parameters; whoever reads one has its step taken first."""

    def __init__(self, content: dict[str, Any], late: Late) -> None:
        super().__init__(content)
        self._asked: Callable[[Any], None] = late.asked

    def plain(self) -> dict[str, Any]:
        return {name: super(_Watched, self).__getitem__(name) for name in self}

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        self._asked(found)
        return found

    def get(self, name: str, default: Any = None) -> Any:
        self._asked(super().get(name))
        return super().get(name, default)

    def values(self) -> Any:
        for one in super().values():
            self._asked(one)
        return super().values()

    def items(self) -> Any:
        for one in super().values():
            self._asked(one)
        return super().items()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def unasked(self) -> Iterator[Any]:
        """The parameters as they are."""
        return iter(super().values())

    def __reduce_ex__(self, protocol: Any) -> Any:  # a copied or saved module is a plain one
        return dict, (dict(self.items()),)


def as_they_are(module: nn.Module) -> Iterator[Any]:
    """A module's own parameters, without having late steps taken."""
    kept = module._parameters
    found = kept.unasked() if isinstance(kept, _Watched) else iter(kept.values())
    return (one for one in found if one is not None)
