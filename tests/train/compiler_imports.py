"""Tests optimizers and DDP before and after PyTorch's compiler is imported."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.train import compiler, parallel
from paceline.train.comms import Comms
from paceline.train.world import World

KINDS = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta"]
STEPS = {kind: vars(getattr(torch.optim, kind)).get("step") for kind in KINDS}


def trained(kind: str, *, compiled: bool = False) -> list[Tensor]:
    """Returns parameters and optimizer state after three steps; reloads the state in each step."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    network = torch.compile(model, backend="eager") if compiled else model
    step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
    for _ in range(3):
        optimizer.zero_grad()
        network(torch.arange(6.0).view(2, 3)).square().mean().backward()
        step()
        optimizer.load_state_dict(optimizer.state_dict())
    state = optimizer.state_dict()["state"]
    moments = [value for one in state.values() for value in one.values() if torch.is_tensor(value)]
    return [*(parameter.detach() for parameter in model.parameters()), *moments]


def replica() -> nn.Module:
    device = torch.device("cpu")
    model = parallel.replicate(nn.Linear(3, 2), device, Comms(World(), device))
    model(torch.ones(1, 3)).sum().backward()
    return model


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


compiler.defer_dynamo()
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
before = {kind: trained(kind) for kind in KINDS}
replica()
assert "torch._dynamo" not in sys.modules, "an optimizer or DDP imports the compiler"
assert "_dynamo" not in vars(torch)

assert same(trained("SGD", compiled=True), before["SGD"])  # imports the compiler
assert torch._dynamo.is_dynamo_supported()
assert not any(type(finder).__module__ == compiler.__name__ for finder in sys.meta_path)
zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__  # type: ignore[attr-defined]
assert vars(zero_grad)["__dynamo_disable"] is not zero_grad  # replaced by the compiler
for kind in KINDS:
    found = getattr(torch.optim, kind).__dict__.get("step")
    assert getattr(found, "hooked", False) or found is STEPS[kind], kind  # wrapped by PyTorch
    assert same(trained(kind), before[kind]), kind
replica()
compiler.defer_dynamo()  # too late: has no effect
dist.destroy_process_group()
