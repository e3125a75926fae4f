"""Tests at which steps checksums of a script's model are taken, and what is known of its DDP."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.agent.ranks import replica_watch


@pytest.mark.parametrize(("cost_s", "steps"), [(0.0, [0, 16, 64, 256]), (10.0, [0])])
def test_compares_replicas_early_unless_checksums_are_slow(
    monkeypatch: pytest.MonkeyPatch, cost_s: float, steps: list[int]
) -> None:
    group = SimpleNamespace(get_process_group_ranks=lambda _: [0, 1])
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    now_s, sent = [0.0], list[int]()
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr(replica_watch, "time", clock)
    monkeypatch.setattr(replica_watch, "weakref", SimpleNamespace(
        ref=lambda model: lambda: model, WeakKeyDictionary=dict))  # fmt: skip
    model: Any = SimpleNamespace(process_group=None, parameters=list)
    replica = replica_watch._WatchedModel(0, model, lambda event: None)

    def send(torch: Any, model: Any, step: int) -> None:
        now_s[0] += cost_s or 0.05 / (1 + 100 * len(sent))  # the first is the slowest
        sent.append(step)

    monkeypatch.setattr(replica, "_send", send)
    for step in range(300):
        replica._step = step
        replica._verify(None, model)
        now_s[0] += 0.001
    assert sent == steps


CALLED = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from paceline.agent.ranks.replica_watch import _exchanges

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
module = torch.nn.Linear(2, 1)
model = DistributedDataParallel(module)
answers = [_exchanges(None)]  # it is not known
for called in (module, module, model, model):
    called(torch.ones(1, 2)).sum().backward()
    answers.append(_exchanges(model))
print(*answers)  # DDP counts a step when the next begins
"""


def test_knows_whether_ddp_has_exchanged_gradients() -> None:
    argv = [sys.executable, "-c", CALLED]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=200)
    assert result.stdout == "True False False False True\n", result.stderr
