"""Tests that ranks of an encrypted job cannot open connections that bypass the tunnels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.agent.ranks import clear_connections, tunnels

DESCRIPTION = "127.70.0.1 10.0.0.1 5000 paceline-tunnels-0"
SPAWNING = """
import multiprocessing

def child():
    import torch.distributed as dist
    import torch.distributed.rpc as rpc
    for connect in (lambda: dist.TCPStore("10.0.0.1", 1), lambda: rpc.init_rpc("worker0")):
        try:
            connect()
        except RuntimeError as error:
            print(error, flush=True)

if __name__ == "__main__":
    from paceline.agent.ranks import clear_connections
    clear_connections.install_in_spawned()
    import torch.distributed
    for method in ("spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=child)
        process.start()
        process.join()
"""


class Store:
    """Stands in for torch's ``TCPStore``."""

    def __init__(self, host_name: str, port: int) -> None:
        self.place = host_name, port


def make_torch(monkeypatch: pytest.MonkeyPatch, **c10d: Any) -> Any:
    """Returns a fake ``torch.distributed`` in which the restrictions are installed."""

    def make_group(size: int, rank: int, ranks: Any, backend: Any, store: Any = None) -> Any:
        return backend, store

    monkeypatch.setattr(Store, "__init__", Store.__init__)  # has the original restored
    rpc = SimpleNamespace(init_rpc=lambda name: name)
    monkeypatch.setitem(sys.modules, "torch.distributed.rpc", rpc)  # type: ignore[arg-type]
    parts = SimpleNamespace(_new_process_group_helper=make_group, **c10d)
    distributed = SimpleNamespace(distributed_c10d=parts, TCPStore=Store, rpc=rpc)
    clear_connections.install(distributed)
    return distributed


@pytest.fixture
def encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tunnels.VARIABLE, DESCRIPTION)


@pytest.mark.usefixtures("encrypted")
@pytest.mark.parametrize("backend", ["mpi", "cpu:gloo,xpu:ccl", "UCC"])
def test_rejects_other_backends(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    c10d = make_torch(monkeypatch).distributed_c10d
    with pytest.raises(RuntimeError, match="--encrypt: connections of the backend"):
        c10d._new_process_group_helper(2, 0, [], backend)


@pytest.mark.usefixtures("encrypted")
@pytest.mark.parametrize("backend", [None, "gloo", "undefined", "cpu:gloo,cuda:nccl"])
def test_allows_gloo_groups(monkeypatch: pytest.MonkeyPatch, backend: str | None) -> None:
    c10d = make_torch(monkeypatch, _use_torchcomms_enabled=lambda: False).distributed_c10d
    assert c10d._new_process_group_helper(2, 0, [], backend, store="s") == (backend, "s")


@pytest.mark.usefixtures("encrypted")
def test_rejects_torchcomms(monkeypatch: pytest.MonkeyPatch) -> None:
    c10d = make_torch(monkeypatch, _use_torchcomms_enabled=lambda: True).distributed_c10d
    with pytest.raises(RuntimeError, match="torchcomms"):
        c10d._new_process_group_helper(2, 0, [], "gloo")


@pytest.mark.usefixtures("encrypted")
def test_rejects_stores_on_network(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_torch(monkeypatch).TCPStore
    for host in ("10.0.0.1", "fd00::1"):
        with pytest.raises(RuntimeError, match=f"a store at {host} cannot be encrypted"):
            store(host, 1)
    with pytest.raises(RuntimeError):
        store(port=1, host_name="10.0.0.1")
    assert store("localhost", 1).place == ("localhost", 1)
    assert store(host_name="127.0.0.2", port=1).place == ("127.0.0.2", 1)


@pytest.mark.usefixtures("encrypted")
def test_rejects_rpc(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"torch\.distributed\.rpc"):
        make_torch(monkeypatch).rpc.init_rpc("worker0")


def test_unencrypted_jobs_are_not_restricted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tunnels.VARIABLE, raising=False)
    distributed = make_torch(monkeypatch)
    assert distributed.TCPStore("10.0.0.1", 1).place == ("10.0.0.1", 1)
    assert distributed.rpc.init_rpc("worker0") == "worker0"
    assert distributed.distributed_c10d._new_process_group_helper(2, 0, [], "mpi")[0] == "mpi"


def test_spawned_processes_are_restricted(tmp_path: Path) -> None:
    script = tmp_path / "spawning.py"
    script.write_text(SPAWNING)
    environment = {**os.environ, tunnels.VARIABLE: DESCRIPTION}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True,
                          text=True, check=True, timeout=120)  # fmt: skip
    assert done.stdout.count("--encrypt: connections to a store at 10.0.0.1") == 2, done.stderr
    assert done.stdout.count("--encrypt: connections of torch.distributed.rpc") == 2, done.stderr
