"""Checks on a GPU that the gradient exchange gives the same bits as DDP's own all-reduce.

``PYTHONPATH=src python3 bench/gpu/exchange.py``, on a machine with one NVIDIA GPU; takes half
a minute. Two ranks share the GPU over gloo, one rank uses NCCL.
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


def weights(method: str, comms: Comms, device: torch.device) -> torch.Tensor:
    """Parameters after eight steps with a method."""
    torch.manual_seed(3)
    network = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)]).to(device)
    replica = parallel.replicate(network, device, comms)
    exchange = GradientExchange(replica, comms)
    if method != "by ddp":
        exchange.reducer = REDUCERS[method](exchange.context())
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    for step in range(8):
        if step == 4 and comms.world.size < 3:
            exchange.set_bucket_sizes(4 << 20, 1 << 20)
        torch.manual_seed(10 * step + comms.world.rank)
        replica(torch.randn(64, 1024, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    exchange.close()
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()]).cpu()


def rank(number: int, size: int, backend: str, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group(backend, rank=number, world_size=size)
    comms = Comms(World(number, size), device)
    expected = weights("by ddp", comms, device)
    for method in ("exact", "fp16", "int8"):
        result = weights(method, comms, device)
        is_equal = torch.equal(result, expected)
        max_difference = float((result - expected).abs().max())
        rows = comms.rows(result[:1000].double())
        ranks_agree = bool((rows == rows[0]).all())
        if number == 0:
            print(f"{backend}, {size} ranks, {method}: same bits as DDP {is_equal}, largest"
                  f" difference {max_difference:.1e}; same on all ranks {ranks_agree}",
                  flush=True)  # fmt: skip
        if not ranks_agree or (method == "exact" and not is_equal):
            raise SystemExit(1)
    dist.destroy_process_group()


def main() -> int:
    print(torch.cuda.get_device_name(), torch.__version__)
    mp.spawn(rank, (1, "nccl", 29811), nprocs=1)
    mp.spawn(rank, (2, "gloo", 29812), nprocs=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
