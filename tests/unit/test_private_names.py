"""Names of Python, click and torch that are not promised, and that we use all the same.

Each stands here with its place, so that a release without it is found out by name.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import os
import sys
from typing import Any

import click
import pytest

OF_PYTHON = [
    ("threading", "_shutdown", "agent/ranks/interpreter_exit.py"),
    ("atexit", "_run_exitfuncs", "agent/ranks/interpreter_exit.py"),
    ("runpy", "_run_module_as_main", "agent/ranks/process.py"),
    ("multiprocessing.process", "ORIGINAL_DIR", "agent/ranks/process.py"),
]
OF_TORCH = [
    ("torch.distributed.rendezvous", "_create_c10d_store", "agent/ranks/master_address.py"),
    ("torch.distributed.distributed_c10d", "init_process_group", "agent/ranks/process.py"),
    ("torch.cuda.nccl", "version", "agent/ranks/forkserver.py"),
    ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState", "train/ddp/scripts.py"),
    ("torch.nn.parallel", "DistributedDataParallel", "train/parallel.py"),
]


def require(module: str, name: str, where: str) -> Any:
    found = getattr(importlib.import_module(module), name, None)
    assert found is not None, f"{module}.{name} is gone, which {where} uses"
    return found


@pytest.mark.parametrize(("module", "name", "where"), OF_PYTHON)
def test_of_python(module: str, name: str, where: str) -> None:
    require(module, name, where)


def test_a_process_of_asyncio_has_a_transport_to_close() -> None:
    """remote/link.py closes the pipes that a grandchild may hold open."""
    parameters = list(inspect.signature(asyncio.subprocess.Process).parameters)
    assert parameters == ["transport", "protocol", "loop"]
    assert "self._transport" in inspect.getsource(asyncio.subprocess.Process.__init__)


def test_asyncio_can_wait_by_pidfd() -> None:
    """remote/fanout.py chooses it where asyncio does not do so by itself."""
    assert hasattr(os, "pidfd_open")
    if sys.version_info < (3, 12):
        assert callable(asyncio.PidfdChildWatcher)
        assert callable(asyncio.set_child_watcher)


def test_click_keeps_options_of_a_function_until_it_is_a_command() -> None:
    """cli/variables.py gives them variables."""

    @click.option("--one")
    def function() -> None: ...

    assert [made.name for made in function.__click_params__] == ["one"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("module", "name", "where"), OF_TORCH)
def test_of_torch(module: str, name: str, where: str) -> None:
    require(module, name, where)


def test_torch_has_what_a_first_optimizer_imports() -> None:
    """launch/planning/entry.py imports it before the fork, train/compiler.py not at all."""
    assert importlib.util.find_spec("torch._dynamo") is not None


def test_torch_makes_its_store_from_a_host_and_a_port() -> None:
    create = require(*OF_TORCH[0])
    assert list(inspect.signature(create).parameters)[:2] == ["hostname", "port"]


def test_torch_takes_a_socket_for_its_store() -> None:
    """agent/ranks/forkserver.py hands it the one that was bound to the chosen address."""
    from torch.distributed import TCPStore

    assert "master_listen_fd" in str(TCPStore.__init__.__doc__)


def test_torch_tells_what_communication_took() -> None:
    """train/parallel.py and agent/ranks/replica_watch.py read it."""
    parallel = require(*OF_TORCH[-1])
    assert hasattr(parallel, "_get_ddp_logging_data")


def test_ddp_has_what_hooks_need() -> None:
    """train/ddp wraps it; without these, hooks of scripts would not be noticed."""
    parallel = require(*OF_TORCH[-1])
    for name in ("_register_builtin_comm_hook", "_build_params_for_reducer", "_lazy_init"):
        assert hasattr(parallel, name), name
    source = inspect.getsource(parallel)
    for name in ("_comm_hooks", "_join_config", "_lazy_init_ran"):
        assert f"self.{name}" in source, name
