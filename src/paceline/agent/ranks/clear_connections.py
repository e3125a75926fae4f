"""Refuses what would connect ranks of an encrypted job past its tunnels: see ``tunnels.py``.

The processes that a rank spawns with ``multiprocessing`` are new interpreters. They get the guards
before they import the script.
"""

from __future__ import annotations

import functools
import os
import socket
from typing import Any, Callable

from . import gloo_peers, gradient_watch, peer_filters, tunnels

_BACKENDS = {"", "gloo", "nccl", "undefined", "fake"}  # NCCL: there are no GPUs in such a job


def install(distributed: Any) -> None:
    """Guards ``torch.distributed``: its backends, stores and RPC raise RuntimeError."""
    if tunnels.current() is None:
        return
    c10d = distributed.distributed_c10d
    if hasattr(c10d, "_new_process_group_helper"):
        c10d._new_process_group_helper = _guard_groups(c10d)
    distributed.TCPStore.__init__ = _guard_stores(distributed.TCPStore.__init__)
    gradient_watch.on_import(
        {"torch.distributed.rpc": _guard_rpc, "multiprocessing.spawn": _guard_spawned}
    )


def install_in_spawned() -> None:
    """Does in a process that a rank has spawned what its own process did at its start."""
    gradient_watch.on_import({"torch.distributed": _guard_imported})


def _guard_imported(distributed: Any) -> None:
    if distributed.is_available():
        c10d = distributed.distributed_c10d
        gloo_peers.install(c10d, on_reject=lambda _: None, on_stranger=lambda _: None)
        install(distributed)


def _guard_rpc(rpc: Any) -> None:
    if hasattr(rpc, "init_rpc"):
        rpc.init_rpc = _refuse_rpc


def _guard_spawned(spawn: Any) -> None:
    original = spawn.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(*args: Any, **kwargs: Any) -> Any:
        return {**original(*args, **kwargs), "clear_connections": _InSpawned()}

    spawn.get_preparation_data = get_preparation_data


class _InSpawned:
    """Pickled into a spawned process, it installs the guards there."""

    def __reduce__(self) -> Any:
        folder = __file__
        for _ in __name__.split("."):  # where its package is
            folder = os.path.dirname(folder)
        code = (
            "import importlib, sys; sys.path.insert(0, folder);"
            " guards = importlib.import_module(name); sys.path.remove(folder);"
            " guards.install_in_spawned()"
        )
        return exec, (code, {"folder": folder, "name": __name__})


def require_gloo(backend: str) -> None:
    """Raises RuntimeError if ranks would talk past the tunnels; ``backend`` is as for torch."""
    names = {part.rpartition(":")[2].strip() for part in backend.lower().split(",")}
    if unsupported := names - _BACKENDS:
        raise _error("connections of the backend %s" % ", ".join(sorted(unsupported)), "Use gloo")


def require_loopback(host: str) -> None:
    """Raises RuntimeError if a store at ``host`` would be on the network."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return  # torch says what is wrong with the name
    if any(address not in peer_filters.LOOPBACK for address in addresses):
        raise _error("connections to a store at %s" % host, 'Use init_method="env://"')


def _guard_groups(c10d: Any) -> Callable[..., Any]:
    make_group = c10d._new_process_group_helper

    @functools.wraps(make_group)
    def guarded(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        require_gloo(str(backend or ""))
        if getattr(c10d, "_use_torchcomms_enabled", bool)():
            raise _error("connections of torchcomms", "Switch it off")
        return make_group(size, rank, ranks, backend, *args, **kwargs)

    return guarded


def _guard_stores(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        require_loopback(args[0] if args else kwargs["host_name"])
        original(self, *args, **kwargs)

    return init


def _refuse_rpc(*_: Any, **__: Any) -> None:
    raise _error("connections of torch.distributed.rpc", "Use collectives of gloo")


def _error(what: str, remedy: str) -> RuntimeError:
    return RuntimeError("--encrypt: %s cannot be encrypted. %s" % (what, remedy))
