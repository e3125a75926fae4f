"""Acts on a script that makes its DistributedDataParallel itself, without changing a line of it.

The launcher's process of a rank calls :func:`install` before the script starts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from paceline.spec.errors import SettingError
from paceline.train.ddp import communication
from paceline.train.reduce.buckets import BucketExchange

# class whose objects exchange gradients by themselves, by the module that defines it
_OTHERS = {
    "torch.distributed.fsdp.fully_sharded_data_parallel": ("FullyShardedDataParallel", "FSDP"),
    "torch.distributed.fsdp._fully_shard._fsdp_state": ("FSDPState", "FSDP (fully_shard)"),
    "torch.distributed._composable.fsdp._fsdp_state": ("FSDPState", "FSDP (fully_shard)"),
    "deepspeed.runtime.engine": ("DeepSpeedEngine", "DeepSpeed"),
}


def install(method: str) -> dict[str, Callable[[Any], None]]:
    """Compresses the gradients of each DistributedDataParallel that this process makes.

    Returns:
        Functions to be called with a module once it has been imported, by the module's name.
    """
    _wrap_constructor(method)
    for name in ("register_comm_hook", "_register_builtin_comm_hook"):
        _wrap_registration(method, name)
    return {
        **{module: functools.partial(_refuse, method, *names) for module, names in _OTHERS.items()},
        "multiprocessing.spawn": functools.partial(_install_in_spawned, method),
    }


def _wrap_constructor(method: str) -> None:
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def construct(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.process_group.size() > 1:
            communication.attach(self, method)

    DistributedDataParallel.__init__ = construct  # type: ignore[method-assign]


def _wrap_registration(method: str, name: str) -> None:
    original = getattr(DistributedDataParallel, name)

    @functools.wraps(original)
    def register(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        state = args[0] if args else kwargs.get("state")
        is_during_construction = not hasattr(self, "_lazy_init_ran")
        if isinstance(state, BucketExchange) or is_during_construction:
            return original(self, *args, **kwargs)
        if self.process_group.size() == 1:
            return original(self, *args, **kwargs)
        raise SettingError(
            f"--communication {method}: the script registers a communication hook of its own",
            found="DistributedDataParallel can have only one",
            remedy="leave out --communication, or the script's hook",
        )

    setattr(DistributedDataParallel, name, register)


def _refuse(method: str, class_name: str, library: str, module: Any) -> None:
    """Makes the constructor of a class raise."""

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        raise SettingError(
            f"--communication {method}: {library} exchanges gradients by itself",
            found="the option is for scripts that use DistributedDataParallel",
            remedy="leave out --communication",
        )

    getattr(module, class_name).__init__ = construct


def _install_in_spawned(method: str, module: Any) -> None:
    """Has processes that ``multiprocessing`` spawns compress gradients, too, by this method.

    They install it before they import the main module.
    """
    original = module.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(*args: Any, **kwargs: Any) -> Any:
        return {**original(*args, **kwargs), "paceline_communication": _InSpawned(method)}

    module.get_preparation_data = get_preparation_data


class _InSpawned:
    """Pickled into a spawned process, it installs there.

    The process unpickles it before it has the folders of ``sys.path``, of which one may have been
    sent by the launcher.
    """

    def __init__(self, method: str) -> None:
        self._method = method

    def __reduce__(self) -> Any:
        folder = str(Path(__file__).resolve().parents[3])
        text = f"import sys; sys.path.append({folder!r}); from {__name__} import install"
        return exec, (f"{text}; install({self._method!r})", {})
