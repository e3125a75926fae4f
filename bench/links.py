"""Hosts of their own for measurements: processes in network namespaces behind one switch.

Needs root, ``ip`` and ``tc``; every namespace goes when its process ends. All ranks are forks of
one process that has imported torch.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_NEWNET = 0x40000000
_PORT = 29711


def _sh(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL)


def _own_network() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare: this needs root")
    _sh("ip", "link", "set", "lo", "up")


def _shape(device: str, rate: str, delay: str) -> None:
    if rate:
        _sh("tc", "qdisc", "add", "dev", device, "root", "handle", "1:", "tbf",
            "rate", rate, "burst", "128k", "latency", "100ms")  # fmt: skip
    if delay:
        parent = ["parent", "1:1"] if rate else ["root"]
        _sh("tc", "qdisc", "add", "dev", device, *parent, "netem", "delay", delay, "limit", "9999")


def on_hosts(
    size: int, rate: str, act: Callable[..., Any], *given: Any, delay: str = ""
) -> list[Any]:
    """What ``act(rank, size, *given)`` returns on each of so many hosts, with a group over gloo.

    Args:
        size: Hosts, one rank on each.
        rate: Of each host's link, each way, in tc's words; empty: as fast as it goes.
        act: Returns what pickle takes.
        delay: One way through each link, in tc's words.
    """
    read, write = os.pipe()
    switch = os.fork()
    if not switch:  # the namespace of the switch is this process's
        os.close(read)
        try:
            found = _switch(size, rate, delay, act, given)
            with os.fdopen(write, "wb") as out:
                pickle.dump(found, out)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as words:
        content = words.read()
    _, status = os.waitpid(switch, 0)
    if status:
        raise SystemExit("a rank failed: see above")
    found: list[Any] = pickle.loads(content)
    return found


def _switch(size: int, rate: str, delay: str, act: Any, given: Any) -> list[Any]:
    _own_network()
    _sh("ip", "link", "add", "sw", "type", "bridge")
    _sh("ip", "link", "set", "sw", "up")
    ranks = []
    for rank in range(size):
        born, told = os.pipe()
        go, start = os.pipe()
        back, answer = os.pipe()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                status = _rank(rank, size, rate, delay, told, go, answer, act, given)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(status)
        os.close(answer)
        os.read(born, 1)
        _sh("ip", "link", "add", f"p{rank}", "type", "veth", "peer", "name", "eth0", "netns", pid)
        _sh("ip", "link", "set", f"p{rank}", "master", "sw", "up")
        _shape(f"p{rank}", rate, "")
        ranks.append((pid, start, back))
    for _, start, _ in ranks:
        os.write(start, b"1")
    found = []
    for _, _, back in ranks:
        with os.fdopen(back, "rb") as words:
            found.append(words.read())
    if any(os.waitpid(pid, 0)[1] for pid, _, _ in ranks):
        raise SystemExit(1)
    return [pickle.loads(one) for one in found]


def _rank(
    rank: int, size: int, rate: str, delay: str, told: int, go: int, answer: int, act: Any,
    given: Any,
) -> int:  # fmt: skip
    _own_network()
    os.write(told, b"1")
    os.read(go, 1)
    _sh("ip", "address", "add", f"10.9.0.{rank + 1}/24", "dev", "eth0")
    _sh("ip", "link", "set", "eth0", "up")
    _shape("eth0", rate, delay)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="10.9.0.1", MASTER_PORT=str(_PORT), GLOO_SOCKET_IFNAME="eth0",
    )  # fmt: skip
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    if size > 1:
        dist.init_process_group("gloo")
    found = act(rank, size, *given)
    if size > 1:
        dist.barrier()
    with os.fdopen(answer, "wb") as out:
        pickle.dump(found, out)
    return 0


def machine() -> str:
    """One line about what this was measured on."""
    return (
        f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()},"
        f" torch {torch.__version__}, {time.strftime('%Y-%m-%d %H:%M')}, load"
        f" {os.getloadavg()[0]:.1f}"
    )
