"""Tests forecasts of step times, on recorded measurements and on models with known results."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import forecast, step_model
from paceline.bench.step_model import HostTiming, LinkTiming, Probe, StepModel, StepTiming
from paceline.spec.training.step_time import BYTES_SENT, StepTime

RECORDED = Path(__file__).parent / "data/forecast/16-core_2026-11-22.json"


def probe(hosts: int, timed: dict[int, float], *, data: float = 0.0, link: LinkTiming | None = None,
          size: int = 8_000_000, buckets: int = 1, **extra: Any) -> Probe:  # fmt: skip
    names = tuple(f"n{number + 1}" for number in range(hosts))
    timings = tuple(
        StepTiming(batch, seconds, data * batch / hosts) for batch, seconds in timed.items()
    )
    return Probe(names, 64_000, 64, 3000, size, buckets, timings, link, **extra)


def two_hosts(
    fixed: float,
    per_sample: float,
    moving: float,
    *,
    buckets: int = 1,
    data: float = 0.0,
    extra: float = 0.0,
    rates: dict[tuple[str, str], float] | None = None,
) -> StepModel:
    """Returns the step model that probes of two hosts with these timings would give."""

    def single_host(share: float) -> float:
        return fixed + per_sample * share

    one = probe(1, {b: single_host(b) + data * b for b in (64, 32, 8)}, data=data)
    both = {b: StepTime(single_host(b / 2), moving, buckets).seconds + extra + data * b / 2
            for b in (64, 16)}  # fmt: skip
    link = LinkTiming(8_000_000, moving, 0.0)
    pair = probe(2, both, data=data, link=link, buckets=buckets)
    return step_model.fit_model({"n1": one}, pair, rates, {"n2": "n1"})


@pytest.mark.parametrize("buckets", [1, 2, 3])
@pytest.mark.parametrize("hosts", [3, 4, 8])
def test_forecast_recovers_known_step_time(hosts: int, buckets: int) -> None:
    fixed, per_sample, moving, data, extra = 0.01, 0.004, 0.2, 0.001, 0.005
    fitted = two_hosts(fixed, per_sample, moving, buckets=buckets, data=data, extra=extra)
    share = 64 / hosts
    step = StepTime(fixed + per_sample * share, moving * step_model.ring_volume(hosts), buckets)
    expected_s = step.seconds + extra
    (predicted,) = forecast.forecast(fitted, [hosts])
    assert predicted.step.seconds == pytest.approx(expected_s + data * share, rel=0.01)
    assert predicted.step.low <= expected_s + data * share <= predicted.step.high
    assert predicted.efficiency == pytest.approx(predicted.speedup / hosts)


@pytest.mark.parametrize(
    ("model", "limit"),
    [
        ((0.01, 0.01, 0.01), "computing"),
        ((0.01, 0.001, 0.3), "link"),
        ((0.2, 0.001, 0.01), "small batch"),
    ],
)
def test_forecast_names_limiting_factor(model: tuple[float, float, float], limit: str) -> None:
    for predicted in forecast.forecast(two_hosts(*model), [2, 4, 8]):
        assert predicted.step.limit == limit
        assert limit.split()[-1] in forecast.advice(predicted, two_hosts(*model))


def test_forecast_reports_data_limit() -> None:
    fitted = two_hosts(0.01, 0.001, 0.01, data=0.01)
    assert {one.step.limit for one in forecast.forecast(fitted, [1, 2, 4])} == {"data"}


def test_slow_link_suggests_compression_and_larger_batch() -> None:
    (predicted,) = forecast.forecast(two_hosts(0.01, 0.004, 0.3), [4])
    assert (predicted.step.limit, predicted.communication) == ("link", "int4")
    assert predicted.with_it is not None
    assert predicted.with_it < 0.5 * predicted.step.seconds
    assert predicted.better_batch >= 256
    (mild,) = forecast.forecast(two_hosts(0.01, 0.004, 0.272, buckets=16), [2])
    assert mild.communication == "int8"  # the least lossy one that is fast enough
    with_auto = replace(two_hosts(0.01, 0.004, 0.3), communication="auto")  # auto stays exact
    assert forecast.forecast(with_auto, [4])[0].communication == ""


def test_weak_scaling_enlarges_batch_and_reduces_steps() -> None:
    fitted = two_hosts(0.0, 0.004, 0.01)
    (predicted,) = forecast.forecast(fitted, [4], weak=True)
    assert (predicted.batch, predicted.steps) == (256, 750)
    assert 3.5 < predicted.speedup <= 4
    (priced,) = forecast.forecast(fitted, [4], price=3.6)
    assert priced.price == pytest.approx(priced.total * 4 * 0.001)


def test_uneven_hosts_choose_fastest_and_suggest_balance() -> None:
    fast, slow = HostTiming(((32, 0.1), (64, 0.2))), HostTiming(((32, 0.3), (64, 0.6)))
    fitted = StepModel({"n1": slow, "n2": fast, "n3": fast}, 1, 64, 100, 6400,
                  probed=("n2", "n3"))  # fmt: skip
    one, two, three = forecast.forecast(fitted, [1, 2, 3])
    assert one.names in (("n2",), ("n3",))
    assert two.names == ("n2", "n3")
    assert three.step.seconds > two.step.seconds  # with even shares the third host costs time
    assert three.by_speed == pytest.approx(0.2 / (1 + 1 + 1 / 3), rel=0.01)
    assert "shares by speed: " in forecast.advice(three, fitted)


@pytest.mark.parametrize(
    ("balance", "seconds"),
    [("auto", 0.2 / (1 + 1 + 1 / 3)), ({"n1": 1, "n2": 2, "n3": 2}, 0.6 / 5), ("even", 0.2)],
)
def test_forecast_uses_balance_of_training(balance: Any, seconds: float) -> None:
    fast, slow = HostTiming(((1, 0.2 / 64), (64, 0.2))), HostTiming(((1, 0.6 / 64), (64, 0.6)))
    fitted = StepModel({"n1": slow, "n2": fast, "n3": fast}, 1, 64, 100, 6400, balance=balance,
                  probed=("n2", "n3"))  # fmt: skip
    (three,) = forecast.forecast(fitted, [3])
    assert three.step.seconds == pytest.approx(seconds, rel=0.01)
    assert (three.by_speed is None) == (balance == "auto")
    assert three.step.limit == "computing"


def test_forecast_avoids_slow_link_if_possible() -> None:
    rates = dict.fromkeys(itertools.permutations(("n1", "n2", "n3", "n4"), 2), 1000000000.0)
    rates |= {pair: 1e8 for pair in rates if "n3" in pair}
    fitted = two_hosts(0.01, 0.002, 0.05, rates=rates)
    fitted = replace(
        fitted, host_timings=dict.fromkeys(("n1", "n2", "n3", "n4"), fitted.host_timings["n1"])
    )
    three, four = forecast.forecast(fitted, [3, 4])
    assert three.names == ("n1", "n2", "n4")
    assert four.step.seconds > 5 * three.step.seconds


def test_declines_unreliable_forecasts() -> None:
    fitted = two_hosts(0.01, 0.004, 0.1)
    (small_batch,) = forecast.forecast(replace(fitted, batch=4), [8])
    assert "no sample for each of 8 processes" in small_batch.declined
    (single_host,) = forecast.forecast(step_model.fit_model({"n1": probe(1, {64: 1.0})}, None), [2])
    assert "only one is named" in single_host.declined
    (noisy,) = forecast.forecast(replace(fitted, spread=0.7), [4])
    assert "differ too much" in noisy.declined
    assert "?" in forecast.render_table([noisy], fitted)
    assert forecast.conclusion([noisy]) == "nothing can be forecast"


def test_host_timing_fits_noisy_and_single_steps() -> None:
    """Times never fall with more samples; below the measured range, they are proportional."""
    noisy = HostTiming.fit([StepTiming(8, 0.05), StepTiming(32, 0.04), StepTiming(64, 0.12)])
    assert noisy.seconds(32) == noisy.seconds(8) == 0.05
    assert noisy.seconds(48) == pytest.approx(0.085)
    single = HostTiming.fit([StepTiming(64, 0.64)])
    assert (single.fixed_s, single.seconds(16)) == (0.0, pytest.approx(0.16))
    assert single.samples_in(0.16) == pytest.approx(16)


def test_forecasts_match_recorded_measurements() -> None:
    """bench/forecast measured four models over four links, on hosts with emulated computation."""
    num_accurate = num_bracketed = num_limits_matched = 0
    for case in json.loads(RECORDED.read_text()):
        for hosts, actual_s in case["came"].items():
            (predicted,), single_host = recorded(case, int(hosts))
            num_accurate += abs(predicted.step.seconds / actual_s - 1) <= 0.1
            num_bracketed += predicted.step.low <= actual_s <= predicted.step.high
            parts = shares_of(case["planted"], 64 / int(hosts), single_host, actual_s)
            max_share = max(parts.values())
            num_limits_matched += (
                max_share - parts[predicted.step.limit] < 0.05 * actual_s
            )  # closer values are a tie
    assert num_accurate >= 44  # of 48 cases
    assert num_bracketed >= 42
    assert num_limits_matched == 48


def recorded(case: dict[str, Any], hosts: int) -> tuple[list[forecast.Forecast], float]:
    """Returns the forecast, and the step time in seconds of a single host with the same share."""
    data, extra = case["data"], {"size": case["bytes"], "data": case["data"]}
    one = probe(1, {b: s + data * b for b, s in case["alone"]}, **extra)
    link = LinkTiming(case["bytes"], case["all_reduce"], case["delay"])
    two = probe(2, dict(case["pair"]), link=link, **extra)
    two = replace(two, buckets=case["buckets"])
    fitted = step_model.fit_model({"n1": one}, two)
    share = 64 / hosts
    return forecast.forecast(fitted, [hosts]), fitted.host_timings["n1"].seconds(
        share
    ) + data * share


def shares_of(
    planted: dict[str, float], share: float, single_host: float, actual_s: float
) -> dict[str, float]:
    parts = {"computing": planted["each"] * share, "data": planted["data"] * share}
    return {
        **parts,
        "small batch": single_host - sum(parts.values()),
        "link": actual_s - single_host,
    }


@pytest.mark.parametrize(
    ("size", "hosts", "ranks", "device", "lost"),
    [
        (1_000_000, 4, 1, "cpu", True),
        (1_000_000, 3, 1, "cpu", False),  # only from four hosts on
        (8_000_000, 4, 1, "cpu", False),  # no short messages
        (1_000_000, 4, 1, "cuda", False),  # NCCL, not gloo
        (1_000_000, 4, 2, "cpu", False),  # already measured with two hosts
    ],
)
def test_gloo_stall_applies_to_short_messages(
    size: int, hosts: int, ranks: int, device: str, lost: bool
) -> None:
    fitted = StepModel({}, ranks, 64, 1, 64, moving=0.01, bytes=size, device=device)
    assert fitted.stall_s(hosts) == (step_model.RING_STALL_S if lost else 0)


def test_renders_text_json_and_svg() -> None:
    fitted = two_hosts(0.01, 0.004, 0.3)
    predicted = forecast.forecast(fitted, [1, 2, 4], price=2.0)
    text = forecast.render_table(predicted, fitted)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "limited by the link" in text
    rendered = json.loads(json.dumps(forecast.to_json(predicted, fitted)))
    assert [one["hosts"] for one in rendered["forecasts"]] == [1, 2, 4]
    assert rendered["forecasts"][1]["low"] < rendered["forecasts"][1]["seconds"]
    assert forecast.render_svg(predicted).count("<circle") == 3
    assert "fastest: " in forecast.conclusion(predicted)


def test_host_counts_are_sparse_for_large_clusters() -> None:
    assert forecast.host_counts(3) == [1, 2, 3]
    assert forecast.host_counts(32) == list(range(1, 33))
    assert forecast.host_counts(100)[31:] == [32, 48, 64, 96, 100]
    assert forecast.host_counts(64)[31:] == [32, 48, 64]
    assert len(forecast.host_counts(forecast.MAX_HOSTS)) < 50


@pytest.mark.parametrize(
    ("price", "rendered"),
    [(12345.678, "12,345.68"), (0.5, "0.50"), (0.0123, "0.012"), (1e-8, "<0.001")],
)
def test_formats_large_and_small_prices(price: float, rendered: str) -> None:
    fitted = two_hosts(0.01, 0.004, 0.3)
    (one,) = forecast.forecast(fitted, [1], price=1.0)
    head, line, *_ = forecast.render_table([replace(one, price=price)], fitted).splitlines()
    assert head.endswith("price")
    assert line.endswith(f" {rendered}")


def test_bytes_sent_table_matches_reducers() -> None:
    from paceline.train.reduce.collectives import ReduceContext
    from paceline.train.reduce.registry import REDUCERS

    for ranks in (2, 3, 4, 16):
        sent = {
            name: reducer(ReduceContext(None, 0, ranks)).bytes_sent(1 << 20, ranks)
            for name, reducer in REDUCERS.items()
            if name in {*BYTES_SENT, "exact"}
        }
        for name, parts in BYTES_SENT.items():
            assert sent[name] / sent["exact"] == pytest.approx(parts[ranks > 2], abs=0.01), name
