"""A stranger between two ranks is noticed where the kernel does not keep it away."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from background import eventually

SCRIPT = Path(__file__).with_name("strangers.py")
OURS, STRANGER = "127.0.0.1", "127.0.0.2"
JOINS = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from paceline.agent.ranks import gloo_peers, peer_filters

peer_filters._LOOPBACK = ()
gloo_peers.install(distributed_c10d, lambda address: print(address, flush=True), print)
place, rank = sys.argv[1], int(sys.argv[2])
# torch splits "gloo" once for CPUs and once for GPUs, with the same keys in the store, and may hang
dist.init_process_group("cpu:gloo", init_method=f"tcp://{place}", rank=rank, world_size=2)
time.sleep(rank)  # who splits a group first calls the other, which takes no calls yet
part = distributed_c10d._get_default_group().split_group([0, 1], None, None, "part", "part")
part.allreduce([torch.ones(1)]).wait()
print("joined", flush=True)
os._exit(0)
"""


def test_a_stranger_in_the_middle_is_named_before_anything_is_exchanged() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=140
    )
    ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(ranks) == 2, done.stderr
    assert not any("sum" in rank for rank in ranks)
    named = [rank for rank in ranks if rank["found"]]  # the other may only see this one's end
    assert named
    for rank in named:
        assert rank["found"] == ["127.0.0.2"]
        assert "connection with 127.0.0.2, which is not one of this job's hosts" in rank["error"]


def results(what: str) -> dict[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), what], capture_output=True, text=True, timeout=140
    )
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(told) == 2, done.stderr
    return {one["rank"]: one for one in told}


def test_a_stranger_that_called_first_is_taken_for_no_rank() -> None:
    told = results("first")
    assert told[0]["found"] == [STRANGER]
    assert f"connection with {STRANGER}, which is not one of this job's hosts" in told[0]["error"]
    assert not any("sum" in one for one in told.values())


def test_a_stranger_that_called_first_and_says_nothing_is_hung_up_on() -> None:
    assert [one.get("sum") for one in results("silent").values()] == [[2.0, 2.0]] * 2


def is_shut_out(port: int) -> bool:
    """Whether a connection from elsewhere is closed at once, or does not come about."""
    try:
        with socket.create_connection((OURS, port), 1, (STRANGER, 0)) as calling:
            return calling.recv(1) == b""
    except ConnectionRefusedError:  # nobody listens yet
        return False
    except ConnectionError:
        return True
    except TimeoutError:  # it is served, and waited for
        return False


def test_a_store_that_rank_0_holds_by_itself_serves_no_stranger() -> None:
    with socket.create_server((OURS, 0)) as free:
        port = free.getsockname()[1]
    env = {**os.environ, "PACELINE_ADDRESSES": OURS, "GLOO_SOCKET_IFNAME": "lo"}

    def start(rank: int) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", JOINS, f"{OURS}:{port}", str(rank)]
        return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True)

    processes = [start(0)]
    try:
        eventually(lambda: is_shut_out(port))
        processes.append(start(1))
        lines = [process.communicate(timeout=100)[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert lines == [[STRANGER, "joined"], ["joined"]]
