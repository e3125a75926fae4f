"""PyTorch's compiler, ``torch._dynamo``, imported when something compiles and not before.

Optimizers and DDP import it to tell it what not to compile, although nothing compiles; that takes
about twice as long as ``import torch``. :func:`defer_dynamo` spares that: the same functions of
PyTorch's run, only without the words to a compiler that is not there. As soon as anything imports
it, ``torch.compile`` first of all, everything is as PyTorch made it.

Only functions that look as they are known to look are touched; another PyTorch imports its compiler
as before.
"""

from __future__ import annotations

import functools
import importlib.abc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

ATTRIBUTE = "_dynamo"
DYNAMO = f"torch.{ATTRIBUTE}"
UNMARKED = "__dynamo_disable"  # where PyTorch keeps what it made of a function not to be compiled


def defer_dynamo() -> None:
    """Makes optimizers and DDP work without the compiler until something imports it."""
    if DYNAMO in sys.modules or any(isinstance(finder, _Restorer) for finder in sys.meta_path):
        return
    restorer = _Restorer()
    methods = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    marked: list[Any] = [vars(Optimizer).get(name) for name in methods]
    context = vars(DistributedDataParallel).get("_inside_ddp_forward")
    marked.append(getattr(context, "__wrapped__", None))
    for function in marked:
        restorer.unwrap(function)
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, Optimizer):
            restorer.replace_step(kind)
    sys.meta_path.insert(0, restorer)


@contextmanager
def placeholder_dynamo() -> Iterator[None]:
    """Context in which DDP is made, with a placeholder for the compiler's settings."""
    is_deferred = any(isinstance(finder, _Restorer) for finder in sys.meta_path)
    if not is_deferred or ATTRIBUTE in vars(torch):
        yield
        return
    placeholder = _DynamoPlaceholder()
    setattr(torch, ATTRIBUTE, placeholder)
    try:
        yield
    finally:
        if vars(torch).get(ATTRIBUTE) is placeholder:  # an import would have replaced it
            delattr(torch, ATTRIBUTE)


class _DynamoPlaceholder:
    """Stands for ``torch._dynamo`` while DDP is made; imports it for anything unexpected."""

    utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")  # without a setting

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(DYNAMO), name)


class _Restorer(importlib.abc.MetaPathFinder):
    """Puts everything back when the compiler is about to be imported; finds no module itself."""

    def __init__(self) -> None:
        self.is_deferred = True
        self._undo: list[Callable[[], None]] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname == DYNAMO and self.is_deferred:
            self.is_deferred = False
            sys.meta_path.remove(self)
            for undo in self._undo:
                undo()

    def unwrap(self, method: Any) -> None:
        """Calls a function that PyTorch never compiles without its wrapper."""
        code = getattr(method, "__code__", None)
        function = getattr(method, "__wrapped__", None)
        if function is None or code is None or UNMARKED not in code.co_consts:
            return
        setattr(function, UNMARKED, function)
        self._undo.append(lambda: delattr(function, UNMARKED))

    def replace_step(self, kind: type[Optimizer]) -> None:
        """Replaces an optimizer's step by one without a graph break."""
        step: Any = vars(kind).get("step")
        code = getattr(step, "__code__", None)
        undecorated = getattr(step, "__wrapped__", None)
        if undecorated is None or code is None or "graph_break" not in code.co_names:
            return

        @functools.wraps(step)
        def step_without_dynamo(*args: Any, **kwargs: Any) -> Any:
            if not self.is_deferred:  # an optimizer may have taken this function into its own
                return step(*args, **kwargs)
            with torch.set_grad_enabled(args[0].defaults["differentiable"]):
                return undecorated(*args, **kwargs)

        def undo() -> None:
            if vars(kind).get("step") is step_without_dynamo:
                kind.step = step  # type: ignore[method-assign]

        kind.step = step_without_dynamo  # type: ignore[method-assign]
        self._undo.append(undo)
