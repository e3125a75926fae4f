"""Virtual hosts for benchmarks: processes in network namespaces behind one switch.

Needs root, ``ip`` and ``tc``; a namespace disappears when its process ends. All ranks are forks
of one process that has imported torch.
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


def _sh(*argv: object) -> None:
    subprocess.run([str(argument) for argument in argv], check=True, stdout=subprocess.DEVNULL)


def _enter_new_network() -> None:
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
    size: int, rate: str, function: Callable[..., Any], *arguments: Any, delay: str = ""
) -> list[Any]:
    """Results of ``function(rank, size, *arguments)`` on each of ``size`` hosts in a gloo group.

    Args:
        size: Number of hosts, with one rank each.
        rate: Rate of each host's link in each direction, in tc's syntax; empty for no limit.
        function: Returns an object that can be pickled.
        arguments: Further arguments of the function.
        delay: One-way delay of each link, in tc's syntax.
    """
    reader, writer = os.pipe()
    switch_pid = os.fork()
    if not switch_pid:  # this process owns the namespace of the switch
        os.close(reader)
        try:
            results = _switch(size, rate, delay, function, arguments)
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(results, pipe)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(switch_pid, 0)
    if status:
        raise SystemExit("a rank failed: see above")
    results: list[Any] = pickle.loads(content)
    return results


def _switch(size: int, rate: str, delay: str, function: Any, arguments: Any) -> list[Any]:
    _enter_new_network()
    _sh("ip", "link", "add", "sw", "type", "bridge")
    _sh("ip", "link", "set", "sw", "up")
    ranks = []
    for rank in range(size):
        ready_reader, ready_writer = os.pipe()
        start_reader, start_writer = os.pipe()
        result_reader, result_writer = os.pipe()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                status = _rank(
                    rank,
                    size,
                    rate,
                    delay,
                    ready_writer,
                    start_reader,
                    result_writer,
                    function,
                    arguments,
                )
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(status)
        os.close(result_writer)
        os.read(ready_reader, 1)
        _sh("ip", "link", "add", f"p{rank}", "type", "veth", "peer", "name", "eth0", "netns", pid)
        _sh("ip", "link", "set", f"p{rank}", "master", "sw", "up")
        _shape(f"p{rank}", rate, "")
        ranks.append((pid, start_writer, result_reader))
    for _, start_writer, _ in ranks:
        os.write(start_writer, b"1")
    results = []
    for _, _, result_reader in ranks:
        with os.fdopen(result_reader, "rb") as pipe:
            results.append(pipe.read())
    if any(os.waitpid(pid, 0)[1] for pid, _, _ in ranks):
        raise SystemExit(1)
    return [pickle.loads(content) for content in results]


def _rank(
    rank: int, size: int, rate: str, delay: str, ready_writer: int, start_reader: int,
    result_writer: int, function: Any, arguments: Any,
) -> int:  # fmt: skip
    _enter_new_network()
    os.write(ready_writer, b"1")
    os.read(start_reader, 1)
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
    result = function(rank, size, *arguments)
    if size > 1:
        dist.barrier()
    with os.fdopen(result_writer, "wb") as out:
        pickle.dump(result, out)
    return 0


def machine() -> str:
    """One line that describes this machine, the software, the time and the load."""
    return (
        f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()},"
        f" torch {torch.__version__}, {time.strftime('%Y-%m-%d %H:%M')}, load"
        f" {os.getloadavg()[0]:.1f}"
    )
