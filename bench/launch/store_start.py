"""The measured job: makes groups over the job's closed store and over an open one, taking turns.

Prints the seconds from a common start to the end of the last rank's first all-reduce, and the CPU
seconds that agents use meanwhile. The open store is torch's own TCPStore, on all addresses of rank
0's host.
"""

import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

ROUNDS = int(sys.argv[1])
OPEN_PORT = 29871
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def fields_of(process: int | str) -> list[str]:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def agent_cpu_s() -> float:
    """Returns the CPU seconds of this host's agent: it started the server that forked this rank."""
    agent = fields_of(fields_of("self")[1])[1]
    user, system = fields_of(agent)[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def make_group(name: str, turn: int) -> tuple[float, float]:
    """Returns the seconds that this rank needed, and the CPU seconds of its agent."""
    at = (address, port) if name == "closed" else (first_host, OPEN_PORT + turn)
    if name == "open" and rank == 0:  # as the closed one, it listens before the others connect
        servers.append(dist.TCPStore(*at, world, is_master=True, wait_for_workers=False))
    dist.barrier()
    start_s, start_cpu_s = time.perf_counter(), agent_cpu_s()
    tcp = dist.TCPStore(*at, world, is_master=False)
    store = dist.PrefixStore(f"{name}{turn}", tcp)
    group = dist.ProcessGroupGloo(store, rank, world)
    group.allreduce([torch.ones(1)]).wait()
    seconds = time.perf_counter() - start_s
    dist.barrier()
    return seconds, agent_cpu_s() - start_cpu_s


dist.init_process_group("gloo")
names: list[object] = [None]
if rank == 0:
    names = [os.popen("hostname -I").read().split()[0]]
dist.broadcast_object_list(names)
first_host = str(names[0])
cpu: dict[str, list[tuple[float, float]]] = {"closed": [], "open": []}
servers: list[dist.TCPStore] = []
times: dict[str, list[float]] = {"closed": [], "open": []}
for turn in range(ROUNDS + 1):
    for name, seconds in times.items():
        own_s, cpu_s = make_group(name, turn)
        slowest = torch.tensor([own_s, cpu_s if rank else 0.0])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if turn:  # the first is a warm-up
            seconds.append(slowest[0].item())
            cpu[name].append((cpu_s, slowest[1].item()))
if rank == 0:
    for name, seconds in times.items():
        print(f"{name}: median {statistics.median(seconds):.3f} s ({min(seconds):.3f}"
              f" to {max(seconds):.3f}), {world} ranks")  # fmt: skip
        first, others = (statistics.median(values) for values in zip(*cpu[name], strict=True))
        print(
            f"  CPU of agents: {first:.2f} s on the store's host, at most {others:.2f} s on others"
        )
    pairs = [a / b for a, b in zip(times["closed"], times["open"], strict=True)]
    print(f"ratio, median of pairs: {statistics.median(pairs):.2f}")
dist.destroy_process_group()
