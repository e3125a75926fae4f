"""The arithmetic of ``bench/slow_links/report.py``, on figures that were made up."""

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
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


report = _report()


def _line(kind: str, method: str, link: str, **found: Any) -> dict[str, Any]:
    about = {"kind": kind, "model": "m", "method": method, "link": link, "lr": 0.1, "seed": 0}
    whole = {"seconds": [], "losses": ["0x1p+0"], "curve": [], "sent": 4e6, **found}
    return {**about, "horizon": 40, "found": whole}


def _curve(*losses: float) -> list[list[float]]:
    """Validations every ten steps of a second each."""
    return [[10 * n, 10.0 * n, loss] for n, loss in enumerate(losses, 1)]


def test_a_loss_is_the_mean_of_the_last_three_validations() -> None:
    smooth = report.smooth(_curve(4.0, 2.0, 3.0, 1.0))
    assert smooth == [(10, 4.0), (20, 3.0), (30, 3.0), (40, 2.0)]


def test_a_final_loss_is_that_at_the_steps_of_ddp() -> None:
    longer = _line("curve", "x", "unshaped", curve=_curve(4, 3, 2, 1, 0.5))
    assert report.final(longer) == pytest.approx(2.0)
    cut = _line("curve", "x", "unshaped", curve=_curve(4, 3, 2))
    assert report.final(cut) == float("inf")
    diverged = _line("curve", "x", "unshaped", curve=_curve(4, 3, float("nan"), float("nan")))
    assert report.final(diverged) == float("inf")


def test_a_target_is_reached_between_validations() -> None:
    curve = [(10, 4.0), (20, 3.0), (30, 1.0)]
    assert report.reached(curve, 2.0) == 25
    assert report.reached(curve, 4.5) == 10
    assert report.reached(curve, 0.5) is None


def test_seconds_go_on_as_the_later_half_of_the_first_steps() -> None:
    first = [5.0, 1.0, 1.0, 3.0]
    assert report.seconds_at(2, first) == 6.0
    assert report.seconds_at(2.5, first) == 6.5
    assert report.seconds_at(4, first) == 10.0
    assert report.seconds_at(10, first) == 10.0 + 6 * 2.0
    # whole periods only: one of two steps in DiLoCo's three exchanges
    assert report.seconds_at(8, [1.0, 9.0, 1.0, 5.0, 1.0, 5.0], period=2) == 22.0 + 2 * 3.0


def test_seconds_of_a_training_on_its_line_lie_between_its_validations() -> None:
    curve = [(10, 20.0, 4.0), (20, 30.0, 3.0)]
    assert report.measured_at(5, curve) == 10.0
    assert report.measured_at(15, curve) == 25.0


def test_a_method_is_held_against_the_loss_that_ddp_ends_with() -> None:
    lines = [
        _line("curve", "ddp", "unshaped", curve=_curve(8, 6, 4, 2)),  # ends with a mean of 4
        _line("pace", "ddp", "slow", seconds=[10.0] * 8),
        _line("curve", "quick", "unshaped", curve=_curve(8, 6, 4, 2)),
        _line("pace", "quick", "slow", seconds=[2.0] * 8),
        _line("curve", "never", "unshaped", curve=_curve(8, 7, 6, 5, 4.9)),
        _line("pace", "never", "slow", seconds=[1.0] * 8),
        _line("curve", "ours auto", "slow", curve=_curve(8, 4, 0, 0)),
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
    # auto took 30 s where DDP took 400, and its loss at DDP's last step is lower
    assert report.verdicts(lines) == ["| m | slow |  | 13.33 | 1 | yes | -66.67% | yes | 1 |"]


def test_the_best_rate_is_that_of_the_least_final_loss() -> None:
    tried = [
        {**_line("rate", "x", "unshaped", curve=_curve(4, 4, 4, end)), "lr": lr}
        for lr, end in ((0.1, 3.0), (0.2, 2.0), (0.4, float("nan")))
    ]
    assert report.best_rate(tried, "m", "x") == 0.2
    assert report.best_rate(tried, "m", "y") is None


def test_other_losses_on_another_line_are_told() -> None:
    one = _line("curve", "x", "unshaped", losses=["0x1p+0", "0x1p+1"])
    same = _line("pace", "x", "slow", losses=["0x1p+0"])
    other = _line("pace", "x", "slower", losses=["0x1.1p+0"])
    assert report.unequal([one, same]) == (1, [])
    assert report.unequal([one, same, other])[0] == 2
    assert len(report.unequal([one, same, other])[1]) == 1
