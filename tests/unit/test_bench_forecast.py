"""The forecast's arithmetic, on recorded steps and on laws whose end is known."""

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
          size: int = 8_000_000, buckets: int = 1, **more: Any) -> Probe:  # fmt: skip
    names = tuple(f"n{number + 1}" for number in range(hosts))
    timings = tuple(
        StepTiming(batch, seconds, data * batch / hosts) for batch, seconds in timed.items()
    )
    return Probe(names, 64_000, 64, 3000, size, buckets, timings, link, **more)


def two_hosts(
    fixed: float,
    each: float,
    moving: float,
    *,
    buckets: int = 1,
    data: float = 0.0,
    more: float = 0.0,
    rates: dict[tuple[str, str], float] | None = None,
) -> StepModel:
    """What probes of such hosts would tell."""

    def alone(share: float) -> float:
        return fixed + each * share

    one = probe(1, {b: alone(b) + data * b for b in (64, 32, 8)}, data=data)
    both = {b: StepTime(alone(b / 2), moving, buckets).seconds + more + data * b / 2
            for b in (64, 16)}  # fmt: skip
    link = LinkTiming(8_000_000, moving, 0.0)
    pair = probe(2, both, data=data, link=link, buckets=buckets)
    return step_model.fit_model({"n1": one}, pair, rates, {"n2": "n1"})


@pytest.mark.parametrize("buckets", [1, 2, 3])
@pytest.mark.parametrize("hosts", [3, 4, 8])
def test_the_law_is_found_again(hosts: int, buckets: int) -> None:
    fixed, each, moving, data, more = 0.01, 0.004, 0.2, 0.001, 0.005
    known = two_hosts(fixed, each, moving, buckets=buckets, data=data, more=more)
    share = 64 / hosts
    step = StepTime(fixed + each * share, moving * step_model.ring_volume(hosts), buckets)
    whole = step.seconds + more
    (found,) = forecast.forecast(known, [hosts])
    assert found.step.seconds == pytest.approx(whole + data * share, rel=0.01)
    assert found.step.low <= whole + data * share <= found.step.high
    assert found.efficiency == pytest.approx(found.speedup / hosts)


@pytest.mark.parametrize(
    ("model", "limit"),
    [
        ((0.01, 0.01, 0.01), "computing"),
        ((0.01, 0.001, 0.3), "link"),
        ((0.2, 0.001, 0.01), "small batch"),
    ],
)
def test_what_limits_is_named(model: tuple[float, float, float], limit: str) -> None:
    for found in forecast.forecast(two_hosts(*model), [2, 4, 8]):
        assert found.step.limit == limit
        assert limit.split()[-1] in forecast.advice(found, two_hosts(*model))


def test_data_that_are_waited_for() -> None:
    known = two_hosts(0.01, 0.001, 0.01, data=0.01)
    assert {one.step.limit for one in forecast.forecast(known, [1, 2, 4])} == {"data"}


def test_a_slow_link_is_lifted_by_sending_less_and_by_a_larger_batch() -> None:
    (found,) = forecast.forecast(two_hosts(0.01, 0.004, 0.3), [4])
    assert (found.step.limit, found.communication) == ("link", "int4")
    assert found.with_it is not None
    assert found.with_it < 0.5 * found.step.seconds
    assert found.better_batch >= 256
    (mild,) = forecast.forecast(two_hosts(0.01, 0.004, 0.272, buckets=16), [2])
    assert mild.communication == "int8"  # the least lossy that hides the bytes
    left_to_it = replace(two_hosts(0.01, 0.004, 0.3), communication="auto")  # which stayed exact
    assert forecast.forecast(left_to_it, [4])[0].communication == ""


def test_weak_scaling_does_more_samples_in_fewer_steps() -> None:
    known = two_hosts(0.0, 0.004, 0.01)
    (found,) = forecast.forecast(known, [4], weak=True)
    assert (found.batch, found.steps) == (256, 750)
    assert 3.5 < found.speedup <= 4
    (priced,) = forecast.forecast(known, [4], price=3.6)
    assert priced.price == pytest.approx(priced.total * 4 * 0.001)


def test_uneven_hosts_the_best_choice_and_shares_by_speed() -> None:
    quick, slow = HostTiming(((32, 0.1), (64, 0.2))), HostTiming(((32, 0.3), (64, 0.6)))
    known = StepModel({"n1": slow, "n2": quick, "n3": quick}, 1, 64, 100, 6400,
                  probed=("n2", "n3"))  # fmt: skip
    one, two, three = forecast.forecast(known, [1, 2, 3])
    assert one.names in (("n2",), ("n3",))
    assert two.names == ("n2", "n3")
    assert three.step.seconds > two.step.seconds  # with even shares the third host costs time
    assert three.by_speed == pytest.approx(0.2 / (1 + 1 + 1 / 3), rel=0.01)
    assert "--balance auto" in forecast.advice(three, known)


@pytest.mark.parametrize(
    ("balance", "seconds"),
    [("auto", 0.2 / (1 + 1 + 1 / 3)), ({"n1": 1, "n2": 2, "n3": 2}, 0.6 / 5), ("even", 0.2)],
)
def test_shares_are_those_of_the_training(balance: Any, seconds: float) -> None:
    quick, slow = HostTiming(((1, 0.2 / 64), (64, 0.2))), HostTiming(((1, 0.6 / 64), (64, 0.6)))
    known = StepModel({"n1": slow, "n2": quick, "n3": quick}, 1, 64, 100, 6400, balance=balance,
                  probed=("n2", "n3"))  # fmt: skip
    (three,) = forecast.forecast(known, [3])
    assert three.step.seconds == pytest.approx(seconds, rel=0.01)
    assert (three.by_speed is None) == (balance == "auto")
    assert three.step.limit == "computing"


def test_a_slow_link_is_kept_out_as_long_as_there_are_others() -> None:
    rates = dict.fromkeys(itertools.permutations(("n1", "n2", "n3", "n4"), 2), 1000000000.0)
    rates |= {pair: 1e8 for pair in rates if "n3" in pair}
    known = two_hosts(0.01, 0.002, 0.05, rates=rates)
    known = replace(
        known, host_timings=dict.fromkeys(("n1", "n2", "n3", "n4"), known.host_timings["n1"])
    )
    three, four = forecast.forecast(known, [3, 4])
    assert three.names == ("n1", "n2", "n4")
    assert four.step.seconds > 5 * three.step.seconds


def test_what_cannot_be_known_is_declined() -> None:
    known = two_hosts(0.01, 0.004, 0.1)
    (few,) = forecast.forecast(replace(known, batch=4), [8])
    assert "no sample for each of 8 processes" in few.declined
    (alone,) = forecast.forecast(step_model.fit_model({"n1": probe(1, {64: 1.0})}, None), [2])
    assert "only one is named" in alone.declined
    (noisy,) = forecast.forecast(replace(known, spread=0.7), [4])
    assert "differ too much" in noisy.declined
    assert "?" in forecast.render_table([noisy], known)
    assert forecast.conclusion([noisy]) == "nothing can be forecast"


def test_a_host_whose_steps_are_noisy_or_few() -> None:
    """More samples never take less time; below what was tried it goes on straight."""
    noisy = HostTiming.fit([StepTiming(8, 0.05), StepTiming(32, 0.04), StepTiming(64, 0.12)])
    assert noisy.seconds(32) == noisy.seconds(8) == 0.05
    assert noisy.seconds(48) == pytest.approx(0.085)
    single = HostTiming.fit([StepTiming(64, 0.64)])
    assert (single.fixed_s, single.seconds(16)) == (0.0, pytest.approx(0.16))
    assert single.samples_in(0.16) == pytest.approx(16)


def test_recorded_probes_and_what_came() -> None:
    """Four models over four links, measured by bench/forecast: hosts with emulated computing."""
    within = inside = named = 0
    for case in json.loads(RECORDED.read_text()):
        for hosts, came in case["came"].items():
            (found,), alone = recorded(case, int(hosts))
            within += abs(found.step.seconds / came - 1) <= 0.1
            inside += found.step.low <= came <= found.step.high
            parts = shares_of(case["planted"], 64 / int(hosts), alone, came)
            most = max(parts.values())
            named += most - parts[found.step.limit] < 0.05 * came  # less is a tie
    assert within >= 44  # of 48
    assert inside >= 42
    assert named == 48


def recorded(case: dict[str, Any], hosts: int) -> tuple[list[forecast.Forecast], float]:
    """The forecast, and the seconds of a host alone with such a share."""
    data, more = case["data"], {"size": case["bytes"], "data": case["data"]}
    one = probe(1, {b: s + data * b for b, s in case["alone"]}, **more)
    link = LinkTiming(case["bytes"], case["all_reduce"], case["delay"])
    two = probe(2, dict(case["pair"]), link=link, **more)
    two = replace(two, buckets=case["buckets"])
    known = step_model.fit_model({"n1": one}, two)
    share = 64 / hosts
    return forecast.forecast(known, [hosts]), known.host_timings["n1"].seconds(share) + data * share


def shares_of(
    planted: dict[str, float], share: float, alone: float, came: float
) -> dict[str, float]:
    parts = {"computing": planted["each"] * share, "data": planted["data"] * share}
    return {**parts, "small batch": alone - sum(parts.values()), "link": came - alone}


@pytest.mark.parametrize(
    ("size", "hosts", "ranks", "device", "lost"),
    [
        (1_000_000, 4, 1, "cpu", True),
        (1_000_000, 3, 1, "cpu", False),  # seen from four on
        (8_000_000, 4, 1, "cpu", False),  # no short messages
        (1_000_000, 4, 1, "cuda", False),  # another library
        (1_000_000, 4, 2, "cpu", False),  # two hosts have shown it
    ],
)
def test_what_gloo_loses_on_short_messages(
    size: int, hosts: int, ranks: int, device: str, lost: bool
) -> None:
    known = StepModel({}, ranks, 64, 1, 64, moving=0.01, bytes=size, device=device)
    assert known.stall_s(hosts) == (step_model.RING_STALL_S if lost else 0)


def test_text_json_and_picture() -> None:
    known = two_hosts(0.01, 0.004, 0.3)
    found = forecast.forecast(known, [1, 2, 4], price=2.0)
    text = forecast.render_table(found, known)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "limited by the link" in text
    said = json.loads(json.dumps(forecast.to_json(found, known)))
    assert [one["hosts"] for one in said["forecasts"]] == [1, 2, 4]
    assert said["forecasts"][1]["low"] < said["forecasts"][1]["seconds"]
    assert forecast.render_svg(found).count("<circle") == 3
    assert "fastest: " in forecast.conclusion(found)


def test_of_many_hosts_some_numbers_are_forecast() -> None:
    assert forecast.host_counts(3) == [1, 2, 3]
    assert forecast.host_counts(32) == list(range(1, 33))
    assert forecast.host_counts(100)[31:] == [32, 48, 64, 96, 100]
    assert forecast.host_counts(64)[31:] == [32, 48, 64]
    assert len(forecast.host_counts(forecast.MAX_HOSTS)) < 50


@pytest.mark.parametrize(
    ("price", "said"),
    [(12345.678, "12,345.68"), (0.5, "0.50"), (0.0123, "0.012"), (1e-8, "<0.001")],
)
def test_little_money_is_told_too(price: float, said: str) -> None:
    known = two_hosts(0.01, 0.004, 0.3)
    (one,) = forecast.forecast(known, [1], price=1.0)
    head, line, *_ = forecast.render_table([replace(one, price=price)], known).splitlines()
    assert head.endswith("price")
    assert line.endswith(f" {said}")


def test_what_other_ways_send_is_what_they_send() -> None:
    from paceline.train.reduce.collectives import ReduceContext
    from paceline.train.reduce.registry import REDUCERS

    for ranks in (2, 3, 4, 16):
        sent = {
            name: made(ReduceContext(None, 0, ranks)).bytes_sent(1 << 20, ranks)
            for name, made in REDUCERS.items()
            if name in {*BYTES_SENT, "exact"}
        }
        for name, parts in BYTES_SENT.items():
            assert sent[name] / sent["exact"] == pytest.approx(parts[ranks > 2], abs=0.01), name
