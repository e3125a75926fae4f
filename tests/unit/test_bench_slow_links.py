"""Tests the arithmetic of ``bench/slow_links/report.py`` on made-up measurements."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PATH = Path(__file__).resolve().parents[2] / "bench/slow_links/report.py"


def _report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("slow_links_report", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


report = _report()


def _record(kind: str, method: str, link: str, **results: Any) -> dict[str, Any]:
    identity = {"kind": kind, "model": "m", "method": method, "link": link, "lr": 0.1, "seed": 0}
    merged = {"seconds": [], "losses": ["0x1p+0"], "curve": [], "sent": 4e6, **results}
    return {**identity, "horizon": 40, "found": merged}


def _curve(*losses: float) -> list[list[float]]:
    """Returns a validation every ten steps; each step takes one second."""
    return [[10 * n, 10.0 * n, loss] for n, loss in enumerate(losses, 1)]


def test_smooth_averages_three_validations() -> None:
    smooth = report.smooth(_curve(4.0, 2.0, 3.0, 1.0))
    assert smooth == [(10, 4.0), (20, 3.0), (30, 3.0), (40, 2.0)]


def test_final_loss_is_taken_at_horizon_of_ddp() -> None:
    extended = _record("curve", "x", "unshaped", curve=_curve(4, 3, 2, 1, 0.5))
    assert report.final(extended) == pytest.approx(2.0)
    truncated = _record("curve", "x", "unshaped", curve=_curve(4, 3, 2))
    assert report.final(truncated) == float("inf")
    diverged = _record("curve", "x", "unshaped", curve=_curve(4, 3, float("nan"), float("nan")))
    assert report.final(diverged) == float("inf")


def test_target_step_is_interpolated_between_validations() -> None:
    curve = [(10, 4.0), (20, 3.0), (30, 1.0)]
    assert report.reached(curve, 2.0) == 25
    assert report.reached(curve, 4.5) == 10
    assert report.reached(curve, 0.5) is None


def test_extrapolates_seconds_from_second_half_of_steps() -> None:
    first = [5.0, 1.0, 1.0, 3.0]
    assert report.seconds_at(2, first) == 6.0
    assert report.seconds_at(2.5, first) == 6.5
    assert report.seconds_at(4, first) == 10.0
    assert report.seconds_at(10, first) == 10.0 + 6 * 2.0
    # counts whole periods only; here, a period is two steps
    assert report.seconds_at(8, [1.0, 9.0, 1.0, 5.0, 1.0, 5.0], period=2) == 22.0 + 2 * 3.0


def test_measured_seconds_are_interpolated() -> None:
    curve = [(10, 20.0, 4.0), (20, 30.0, 3.0)]
    assert report.measured_at(5, curve) == 10.0
    assert report.measured_at(15, curve) == 25.0


def test_methods_are_compared_at_final_loss_of_ddp() -> None:
    lines = [
        _record("curve", "ddp", "unshaped", curve=_curve(8, 6, 4, 2)),  # final mean: 4
        _record("pace", "ddp", "slow", seconds=[10.0] * 8),
        _record("curve", "quick", "unshaped", curve=_curve(8, 6, 4, 2)),
        _record("pace", "quick", "slow", seconds=[2.0] * 8),
        _record("curve", "never", "unshaped", curve=_curve(8, 7, 6, 5, 4.9)),
        _record("pace", "never", "slow", seconds=[1.0] * 8),
        _record("curve", "ours auto", "slow", curve=_curve(8, 4, 0, 0)),
    ]
    assert report.to_target(lines, "m", "ddp", "slow", 0) == (400.0, "composed")
    assert report.to_target(lines, "m", "quick", "slow", 0) == (80.0, "composed")
    assert report.to_target(lines, "m", "never", "slow", 0) == (None, "composed")
    assert report.to_target(lines, "m", "ours auto", "slow", 0) == (30.0, "measured")
    assert report.to_target(lines, "m", "ddp", "other", 0) is None
    assert report.worse(lines, "m", "never", "slow", 0) == pytest.approx(0.5)
    assert report.median([3.0, None, 1.0]) == 3.0
    assert report.median([3.0, None, None]) is None
    assert "| quick | 0.1 | 2000 |" in report.table(lines)
    # auto took 30 s instead of DDP's 400 s, and its loss at DDP's last step is lower
    assert report.verdicts(lines) == ["| m | slow |  | 13.33 | 1 | yes | -66.67% | yes | 1 |"]


def test_best_rate_minimizes_final_loss() -> None:
    candidates = [
        {**_record("rate", "x", "unshaped", curve=_curve(4, 4, 4, end)), "lr": lr}
        for lr, end in ((0.1, 3.0), (0.2, 2.0), (0.4, float("nan")))
    ]
    assert report.best_rate(candidates, "m", "x") == 0.2
    assert report.best_rate(candidates, "m", "y") is None


def test_reports_losses_that_differ_between_links() -> None:
    reference = _record("curve", "x", "unshaped", losses=["0x1p+0", "0x1p+1"])
    equal = _record("pace", "x", "slow", losses=["0x1p+0"])
    different = _record("pace", "x", "slower", losses=["0x1.1p+0"])
    assert report.unequal([reference, equal]) == (1, [])
    assert report.unequal([reference, equal, different])[0] == 2
    assert len(report.unequal([reference, equal, different])[1]) == 1
