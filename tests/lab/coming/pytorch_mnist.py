"""Initializes like the demo of Intel's containers, without its data, torchvision and tensorboardX.

It reads its rank only from Hydra's variables, and requests oneCCL's backend.
"""

import argparse
import os

import oneccl_bindings_for_pytorch  # noqa: F401 - names the backend
import torch
import torch.distributed as dist

os.environ["RANK"], os.environ["WORLD_SIZE"] = os.environ["PMI_RANK"], os.environ["PMI_SIZE"]
parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cpu", choices=["cpu", "xpu"])
parser.add_argument("--save-model", action="store_true")
options = parser.parse_args()
device = torch.device(f"{options.device}:{os.environ['MPI_LOCALRANKID']}")
dist.init_process_group(backend=dist.Backend.CCL)
total = torch.ones(1)
dist.all_reduce(total)
print(f"accuracy={total.item() / dist.get_world_size():.4f}")
if options.save_model:
    torch.save({"total": total}, "mnist_cnn.pt")
dist.destroy_process_group()
