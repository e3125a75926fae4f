"""The exchange of gradients on an accelerator: the hook's stream gives the bits of DDP's own path.

``PYTHONPATH=src python3 bench/gpu/exchange.py``, on a machine with one NVIDIA GPU; half a minute.
Two ranks share the GPU over gloo, one rank uses NCCL.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from paceline.train import parallel
from paceline.train.comms import Comms
from paceline.train.reduce.exchange import GradientExchange
from paceline.train.reduce.registry import REDUCERS
from paceline.train.world import World


def weights(way: str, comms: Comms, device: torch.device) -> torch.Tensor:
    """After some steps."""
    torch.manual_seed(3)
    network = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)]).to(device)
    replica = parallel.replicate(network, device, comms)
    exchange = GradientExchange(replica, comms)
    if way != "by ddp":
        exchange.reducer = REDUCERS[way](exchange.context())
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    for step in range(8):
        if step == 4 and comms.world.size < 3:
            exchange.set_bucket_sizes(4 << 20, 1 << 20)
        torch.manual_seed(10 * step + comms.world.rank)
        replica(torch.randn(64, 1024, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    exchange.close()
    return torch.cat([one.detach().flatten() for one in network.parameters()]).cpu()


def rank(number: int, size: int, backend: str, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group(backend, rank=number, world_size=size)
    comms = Comms(World(number, size), device)
    expected = weights("by ddp", comms, device)
    for way in ("exact", "fp16", "int8"):
        found = weights(way, comms, device)
        same = torch.equal(found, expected)
        far = float((found - expected).abs().max())
        rows = comms.rows(found[:1000].double())
        alike = bool((rows == rows[0]).all())
        if number == 0:
            print(f"{backend}, {size} ranks, {way}: same bits as DDP {same}, at most {far:.1e}"
                  f" away; alike on all ranks {alike}", flush=True)  # fmt: skip
        if not alike or (way == "exact" and not same):
            raise SystemExit(1)
    dist.destroy_process_group()


def main() -> int:
    print(torch.cuda.get_device_name(), torch.__version__)
    mp.spawn(rank, (1, "nccl", 29811), nprocs=1)
    mp.spawn(rank, (2, "gloo", 29812), nprocs=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
