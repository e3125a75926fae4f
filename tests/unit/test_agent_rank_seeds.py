"""Ranks of one host are forked from one process, but draw different random numbers."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from paceline.agent.ranks import process


def test_reseeds_numpy_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[str] = []
    numpy_random = SimpleNamespace(seed=lambda: seeded.append("numpy"))
    generator = SimpleNamespace(seed=lambda: seeded.append("torch"))
    monkeypatch.setitem(sys.modules, "numpy.random", numpy_random)
    monkeypatch.setitem(sys.modules, "torch.random", SimpleNamespace(default_generator=generator))
    process._reseed()
    assert seeded == ["numpy", "torch"]
