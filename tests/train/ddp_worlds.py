"""Runs, in forked worlds, scripts that make their own DistributedDataParallel model."""

from __future__ import annotations

import gc
import json
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import forked_worlds
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import Join
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from paceline.agent.ranks import replica_watch
from paceline.spec.errors import SettingError
from paceline.train import communication_hook
from paceline.train.ddp import scripts
from paceline.train.ddp.exchange import ScriptExchange

PREPARATION_S = 3.0  # of rank 0, before the first step
METHODS = ("fp16", "bf16", "int8", "int4", "auto")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


class Net(nn.Module):
    """Uses its layers in another order than it lists them, so that DDP rebuilds its buckets.

    The layer ``rarely`` is used on request only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(128, 10)
        self.rarely = nn.Linear(128, 128)
        self.first = nn.Linear(32, 128)
        self.middle = nn.Linear(128, 128)

    def forward(self, inputs: Tensor, rarely: bool = True) -> Tensor:
        hidden = self.middle(self.first(inputs).relu()).relu()
        return self.last(hidden + self.rarely(hidden) if rarely else hidden)


class Sparse(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(10, 3, sparse=True))


def made(method: str = "", network: Callable[[], nn.Module] = Net, **options: Any) -> Any:
    torch.manual_seed(1)
    model = DistributedDataParallel(network(), **options)
    if method:
        model.register_comm_hook(*communication_hook(model, method))
    return model


def batches(count: int, *, size: int = 8) -> Iterable[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    for _ in range(count):
        inputs = torch.randn(size, 32, generator=generator)
        yield inputs, inputs[:, :10].argmax(1)


def flat(tensors: Iterable[Tensor | None]) -> Tensor:
    return torch.cat([one.detach().flatten() for one in tensors if one is not None])


def trained(model: Any, steps: int = 25) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for inputs, targets in batches(steps):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return flat(model.parameters())


def alike(tensor: Tensor) -> bool:
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor)
    return all(torch.equal(row, rows[0]) for row in rows)


def every_method() -> dict[str, Any]:
    exact = trained(made())
    state = torch.get_rng_state()
    found = {}
    for method in METHODS:
        for name, options in OPTIONS.items():
            model = made(method, **options)
            end = trained(model)
            off = float((end - exact).norm() / exact.norm())
            draws = not torch.equal(torch.get_rng_state(), state)
            found[f"{method} {name}"] = {"off": off, "alike": alike(end), "draws": draws}
    return found


def summed(model: Any, every: int, passes: Iterable[bool]) -> Tensor:
    """Returns the summed gradients of some steps; each step accumulates ``every`` batches."""
    total = torch.zeros(sum(p.numel() for p in model.parameters()))
    for inputs, targets, rarely in [(*b, r) for b, r in zip(batches(40), passes, strict=False)]:
        model.zero_grad(set_to_none=False)
        parts = zip(inputs.chunk(every), targets.chunk(every), strict=True)
        for number, (part, aims) in enumerate(parts):
            if number < every - 1:
                with model.no_sync():
                    cross_entropy(model(part, rarely), aims).backward()
            else:
                cross_entropy(model(part, rarely), aims).backward()
        total += flat(p.grad for p in model.parameters())
    return total


def owed(model: Any, exchange: Any) -> Tensor:
    """Returns the gradients' unsent residual, averaged over the ranks."""
    views = exchange.reducer._feedback._views
    errors = flat(  # parameters in a bucket that is too small have no residual
        views[name].committed.float() if name in views else torch.zeros_like(parameter)
        for name, parameter in model.module.named_parameters()
    )
    dist.all_reduce(errors)
    return errors / dist.get_world_size()


def accumulated() -> dict[str, float]:
    """Returns the part of the exact gradients that is neither sent nor kept as residual."""
    found = {}
    always, seldom = [True] * 12, [number % 4 == 0 for number in range(12)]
    for name, every, passes, options in (
        ("each step", 1, always, {}),
        ("three batches", 3, always, {}),
        ("unused", 1, seldom, {"find_unused_parameters": True}),
        ("unused, three batches", 3, seldom, {"find_unused_parameters": True}),
    ):
        exact = summed(made(**options), every, passes)
        model = made(**options)
        exchange, hook = communication_hook(model, "int8")
        model.register_comm_hook(exchange, hook)
        coded = summed(model, every, passes)
        left = owed(model, exchange)
        found[name] = float((exact - coded - left).norm() / left.norm())
    return found


def refused(act: Callable[[], object]) -> str:
    try:
        act()
    except SettingError as error:
        return str(error)
    return ""


def two_models() -> bool:
    """As in a GAN: the second model's loss goes through the first model, too."""
    first, second = made("int8"), made("int8", network=lambda: nn.Linear(10, 2000))
    optimizers = [torch.optim.SGD(model.parameters(), 0.05) for model in (first, second)]
    for number, (inputs, _) in enumerate(batches(10)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        second(first(inputs)).square().mean().backward()
        optimizers[number % 2].step()
    return alike(flat([*first.parameters(), *second.parameters()]))


def overflowed() -> tuple[bool, list[float]]:
    """One rank's gradient is not finite in one step; all ranks skip that step."""
    model, scaler = made("int8"), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scales = []
    for number, (inputs, targets) in enumerate(batches(6)):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        if number == 3 and dist.get_rank() == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    end = flat(model.parameters())
    return alike(end) and bool(end.isfinite().all()), scales


def uneven() -> bool:
    """Rank 0 has fewer batches than the others."""
    model = made("int4")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Join([model]):
        for inputs, targets in batches(4 + dist.get_rank()):
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    return True


def relaid(**options: Any) -> bool:
    """Buckets change while gradients are accumulated; no gradient is lost."""
    found = []
    for changes in (False, True):
        model = made(**options)
        exchange, hook = communication_hook(model, "fp16")
        assert isinstance(exchange, ScriptExchange)
        model.register_comm_hook(exchange, hook)
        model.register_forward_pre_hook(exchange.before_forward)
        for number, (inputs, targets) in enumerate(batches(4)):
            cross_entropy(model(inputs), targets).backward()
            if changes and number == 1:
                exchange.set_bucket_sizes(1 << 15, 1 << 14)
        found.append(flat(p.grad for p in model.parameters()))
    return torch.allclose(*found, rtol=1e-2, atol=1e-4)


def freed() -> bool:
    model = made("int8")
    trained(model, 3)
    reference = weakref.ref(model)
    del model
    gc.collect()
    return reference() is None


def small() -> bool:
    """Buckets that are too small for codes are averaged as by DDP, to the bit."""
    first, second = [trained(made(method, lambda: nn.Linear(32, 10))) for method in ("", "int4")]
    # for more than two ranks, gloo adds in another order
    is_pair = dist.get_world_size() == 2
    return torch.equal(first, second) if is_pair else torch.allclose(first, second, atol=1e-6)


def part_of_the_ranks() -> dict[str, Any]:
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return {}
    ends = []
    for method in ("", "int8"):
        ends.append(trained(made(method, process_group=group), 10))
    message = refused(lambda: communication_hook(made(process_group=group), "auto"))
    return {"off": float((ends[0] - ends[1]).norm() / ends[0].norm()), "auto": message}


def world(found: dict[str, Any]) -> None:
    found["methods"] = every_method()
    found["accumulated"] = accumulated()
    found["two models"] = two_models()
    found["overflowed"] = overflowed()
    found["uneven"] = uneven()
    found["relaid"] = relaid(gradient_as_bucket_view=True)
    found["relaid, static graph"] = relaid(static_graph=True)
    found["freed"] = freed()
    found["small"] = small()
    if dist.get_world_size() > 2:
        found["part"] = part_of_the_ranks()
    found["refused"] = {
        "unknown": refused(lambda: communication_hook(made(), "powersgd")),
        "sparse": refused(lambda: communication_hook(made(network=Sparse), "int8")),
        "hooked": refused(lambda: communication_hook(made("int8"), "int8")),
    }


def installed(found: dict[str, Any]) -> None:
    """Installs the hook as in a rank that the launcher starts."""
    exact = trained(made())
    callbacks = scripts.install("int8")
    import torch.distributed.fsdp
    import torch.distributed.fsdp._fully_shard._fsdp_state
    import torch.distributed.fsdp.fully_sharded_data_parallel

    for name, callback in callbacks.items():
        if name in sys.modules:
            callback(sys.modules[name])
    model = made()
    found["off"] = float((trained(model) - exact).norm() / exact.norm())
    found["hooks"] = [hook.__name__ for hook, _ in model._comm_hooks]
    found["hook of its own"] = refused(lambda: made().register_comm_hook(None, fp16_compress_hook))
    found["builtin hook"] = refused(
        lambda: made()._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    )
    found["fsdp"] = refused(lambda: torch.distributed.fsdp.FullyShardedDataParallel(Net()))
    found["fsdp2"] = refused(lambda: torch.distributed.fsdp.fully_shard(Net()))


def watched(found: dict[str, Any]) -> None:
    """Returns reports about parameters after one rank has changed one of them."""
    reports: list[dict[str, Any]] = []
    replica_watch.MIN_INTERVAL = 8
    replica_watch.COST_SHARE = 1e9
    replica_watch.ReplicaWatch(reports.append).install()
    model, probe = made(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if dist.get_rank() == 0:
        time.sleep(PREPARATION_S)
    for number, (inputs, targets) in enumerate(batches(30)):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        if dist.get_rank() == 0:  # an optimizer of another model
            torch.optim.SGD(probe.parameters(), 0.1).step()
        optimizer.step()
        if number == 18 and dist.get_rank() == 1:
            model.module.middle.bias.data[3] += 1e-6
    rows: list[list[dict[str, Any]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(rows, reports)
    found["reports"] = rows


def joined(found: dict[str, Any]) -> None:
    """Returns reports about a model in ``Join``, of which rank 0 has no data at first."""
    reports: list[dict[str, Any]] = []
    replica_watch.ReplicaWatch(reports.append, measure=False).install()
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(3):
        with Join([model]):
            for inputs, targets in batches((8 + epoch) * dist.get_rank() + 16 * epoch):
                optimizer.zero_grad()
                cross_entropy(model(inputs), targets).backward()
                optimizer.step()
    rows: list[list[dict[str, Any]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(rows, reports)
    found["reports"], found["alike"] = rows, alike(flat(model.parameters()))


def in_world(body: Callable[[dict[str, Any]], None], file: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    body(found)
    if dist.get_rank() == 0:
        file.write_text(json.dumps(found))
    dist.barrier()  # rank 0 holds the store


def main() -> None:
    folder = Path(sys.argv[1])
    for size in (2, 3):
        file = folder / f"{size}.json"
        forked_worlds.run_ok(size, lambda f=file: in_world(world, f))  # type: ignore[misc]
    forked_worlds.run_ok(2, lambda: in_world(installed, folder / "installed.json"))
    forked_worlds.run_ok(3, lambda: in_world(watched, folder / "watched.json"))
    forked_worlds.run_ok(3, lambda: in_world(joined, folder / "joined.json"))


if __name__ == "__main__":
    main()
