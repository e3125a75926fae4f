"""Sends a message between processes that the ranks spawn, over the network if they may choose."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

os.environ["GLOO_SOCKET_IFNAME"] = sys.argv[1]  # the spawned process runs this line, too
MESSAGE = b"from a spawned process"


def worker(_: int) -> None:
    dist.init_process_group("gloo")
    is_sender = dist.get_rank() == 0
    message = bytearray(MESSAGE if is_sender else len(MESSAGE))
    dist.broadcast(torch.frombuffer(message, dtype=torch.uint8), 0)
    print(f"rank {dist.get_rank()} has {message.decode()!r}", flush=True)


if __name__ == "__main__":
    mp.spawn(worker)
