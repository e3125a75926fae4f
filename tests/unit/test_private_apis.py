"""Tests that private names of Python, click and torch that Paceline uses still exist.

Each test says where the name is used, so that a release without it fails here with that name.
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

PYTHON_NAMES = [
    ("threading", "_shutdown", "agent/ranks/interpreter_exit.py"),
    ("atexit", "_run_exitfuncs", "agent/ranks/interpreter_exit.py"),
    ("runpy", "_run_module_as_main", "agent/ranks/process.py"),
    ("multiprocessing.process", "ORIGINAL_DIR", "agent/ranks/process.py"),
]
TORCH_NAMES = [
    ("torch.distributed.rendezvous", "_create_c10d_store", "agent/ranks/master_address.py"),
    ("torch.distributed.distributed_c10d", "init_process_group", "agent/ranks/process.py"),
    ("torch.cuda.nccl", "version", "agent/ranks/forkserver.py"),
    ("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState", "train/ddp/scripts.py"),
    ("torch.nn.parallel", "DistributedDataParallel", "train/parallel.py"),
]


def require(module: str, name: str, used_in: str) -> Any:
    attribute = getattr(importlib.import_module(module), name, None)
    assert attribute is not None, f"{module}.{name} is gone, which {used_in} uses"
    return attribute


@pytest.mark.parametrize(("module", "name", "used_in"), PYTHON_NAMES)
def test_python_names_exist(module: str, name: str, used_in: str) -> None:
    require(module, name, used_in)


def test_asyncio_process_has_transport() -> None:
    """Used by remote/link.py, which closes pipes that a grandchild process may hold open."""
    parameters = list(inspect.signature(asyncio.subprocess.Process).parameters)
    assert parameters == ["transport", "protocol", "loop"]
    assert "self._transport" in inspect.getsource(asyncio.subprocess.Process.__init__)


def test_asyncio_supports_pidfd() -> None:
    """Used by remote/fanout.py in Python versions in which asyncio does not do so by default."""
    assert hasattr(os, "pidfd_open")
    if sys.version_info < (3, 12):
        assert callable(asyncio.PidfdChildWatcher)
        assert callable(asyncio.set_child_watcher)


def test_click_stores_options_on_function() -> None:
    """Used by cli/variables.py, which assigns environment variables to the options."""

    @click.option("--one")
    def function() -> None: ...

    assert [parameter.name for parameter in function.__click_params__] == ["one"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("module", "name", "used_in"), TORCH_NAMES)
def test_torch_names_exist(module: str, name: str, used_in: str) -> None:
    require(module, name, used_in)


def test_torch_has_dynamo_module() -> None:
    """launch/planning/entry.py imports it before the fork; train/compiler.py avoids the import."""
    assert importlib.util.find_spec("torch._dynamo") is not None


def test_create_c10d_store_signature() -> None:
    create = require(*TORCH_NAMES[0])
    assert list(inspect.signature(create).parameters)[:2] == ["hostname", "port"]


def test_tcp_store_accepts_listen_socket() -> None:
    """Used by agent/ranks/forkserver.py, which passes a socket bound to the chosen address."""
    from torch.distributed import TCPStore

    assert "master_listen_fd" in str(TCPStore.__init__.__doc__)


def test_ddp_has_logging_data() -> None:
    """Used by train/parallel.py and agent/ranks/replica_watch.py."""
    parallel = require(*TORCH_NAMES[-1])
    assert hasattr(parallel, "_get_ddp_logging_data")


def test_ddp_reducer_takes_an_order_of_gradients() -> None:
    """Used by train/reduce/buckets.py, so that DDP does not order them as they arrive."""
    from torch.distributed import Reducer

    assert hasattr(Reducer, "_push_all_rebuilt_params")


def test_ddp_has_hook_attributes() -> None:
    """Used by train/ddp, which wraps them to notice the hooks of scripts."""
    parallel = require(*TORCH_NAMES[-1])
    for name in ("_register_builtin_comm_hook", "_build_params_for_reducer", "_lazy_init"):
        assert hasattr(parallel, name), name
    source = inspect.getsource(parallel)
    for name in ("_comm_hooks", "_join_config", "_lazy_init_ran"):
        assert f"self.{name}" in source, name


def test_join_has_attributes() -> None:
    """Used by agent/ranks/replica_watch.py, which ends its comparisons in ``Join``."""
    join = require("torch.distributed.algorithms.join", "Join", "agent/ranks/replica_watch.py")
    assert callable(join.__enter__)
    for name in ("_enable", "_joinables"):
        assert f"self.{name}" in inspect.getsource(join), name
