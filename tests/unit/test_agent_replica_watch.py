"""At which steps the checksums of a script's model are taken."""

from __future__ import annotations

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
    replica = replica_watch._Replica(0, model, lambda event: None)

    def send(torch: Any, model: Any, step: int) -> None:
        now_s[0] += cost_s or 0.05 / (1 + 100 * len(sent))  # the first is the slowest
        sent.append(step)

    monkeypatch.setattr(replica, "_send", send)
    for step in range(300):
        replica._step = step
        replica._verify(None, model)
        now_s[0] += 0.001
    assert sent == steps
