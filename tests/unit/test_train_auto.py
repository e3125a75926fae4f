"""Tests the automatic choice of a communication method, and its messages."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from paceline.train.comms import Comms
from paceline.train.measure.pace import PARTS, StepTimings
from paceline.train.reduce import auto
from paceline.train.reduce.auto import AutoMethod
from paceline.train.reduce.choice import Communication
from paceline.train.reduce.collectives import ReduceContext
from paceline.train.reduce.exchange import GradientExchange
from paceline.train.reduce.registry import REDUCERS
from paceline.train.reduce.selection import CANDIDATES, Measurement, choose
from paceline.train.world import World


def measured(megabits: float, *, computing: float = 0.14, megabytes: float = 7.6) -> Measurement:
    """Returns measurements of two ranks that encode and decode at 1.5 GB/s."""
    elements, reduce_context = int(megabytes * 250_000), ReduceContext(None, 0, 2)
    sent = {
        method_name: REDUCERS[method_name](reduce_context).bytes_sent(elements, 2)
        for method_name in CANDIDATES
    }
    coding = {
        method_name: 0.0 if method_name == "exact" else megabytes / 1500
        for method_name in CANDIDATES
    }
    return Measurement(computing, 4 * elements, 0.001, megabits * 125_000, sent, coding)


@pytest.mark.parametrize(
    ("megabits", "method_name"),
    [
        (10_000, "exact"),
        (1_000, "exact"),
        (450, "fp16"),
        (200, "int8"),
        (100, "int4"),
        (20, "int4"),
    ],
)
def test_chooses_most_precise_method_that_hides_transfer(megabits: float, method_name: str) -> None:
    assert choose(measured(megabits)).method == method_name


def test_forecast_is_never_slower_than_exact() -> None:
    for megabits in (1, 20, 100, 1_000, 10_000, 100_000):
        for computing in (0.001, 0.1, 10.0):
            one = choose(measured(megabits, computing=computing))
            assert one.seconds[one.method] <= one.seconds["exact"] * 1.0001 or one.method == "exact"


def test_slow_encoding_selects_exact() -> None:
    one = measured(2_000)
    slow_encoding = Measurement(
        one.computing_s, one.gradient_bytes, one.latency_s, one.bytes_per_s, one.sent,
        {method_name: 0.0 if method_name == "exact" else 1.0 for method_name in CANDIDATES},
    )  # fmt: skip
    assert choose(slow_encoding).method == "exact"


def test_high_latency_prefers_fewer_buckets() -> None:
    low_latency = measured(100)
    high_latency = Measurement(
        low_latency.computing_s,
        low_latency.gradient_bytes,
        0.04,
        low_latency.bytes_per_s,
        low_latency.sent,
        low_latency.coding_s,
    )
    assert high_latency.best("int8")[0] < low_latency.best("int8")[0]


def test_choice_has_hysteresis() -> None:
    methods = [choose(measured(megabits)).method for megabits in range(60, 400, 5)]
    changes = [
        position for position, pair in enumerate(itertools.pairwise(methods)) if pair[0] != pair[1]
    ]
    assert changes
    for position in changes:  # no change back at a slightly slower network
        assert (
            choose(measured(60 + 5 * position), present=methods[position + 1]).method
            == methods[position + 1]
        )


@dataclass
class FakeExchange:
    """Stands in for an exchange, without a model."""

    rank: int
    elements: int = 2_000_000
    reducer: Any = None
    former_reducer: Any = None
    layout: tuple[int, int] = (0, 0)
    sizes: tuple[int, ...] = (1_999_000, 1_000)

    @property
    def exchanged(self) -> list[Tensor]:
        return [torch.empty(size, device="meta") for size in self.sizes]

    @property
    def nbytes(self) -> int:
        return 4 * self.elements

    def context(self) -> ReduceContext:
        return ReduceContext(None, self.rank, 2)

    def set_bucket_sizes(self, size: int, first: int) -> None:
        self.layout = size, first

    def reset(self) -> None:
        self.layout, self.reducer = (0, 0), None


class ThreadMax:
    """Computes maxima over two threads."""

    def __init__(self) -> None:
        self._told: dict[int, list[float]] = {}
        self._barrier = threading.Barrier(2)

    def most(self, rank: int, vector: Tensor) -> list[float]:
        self._told[rank] = [float(one) for one in vector]
        self._barrier.wait(20)
        results = [max(pair) for pair in zip(self._told[0], self._told[1], strict=True)]
        self._barrier.wait(20)
        return results


@dataclass(slots=True)
class ThreadComms(Comms):
    """Collective operations between two threads."""

    both: ThreadMax | None = None

    def max(self, vector: Tensor) -> list[float]:
        assert self.both is not None
        return self.both.most(self.world.rank, vector)


def make_timings(first: int, computing: float, moving: float, steps: int = 5) -> StepTimings:
    seconds = torch.zeros(2, steps, len(PARTS), dtype=torch.float64)
    seconds[:, :, PARTS.index("computing")] = computing
    seconds[:, :, PARTS.index("moving")] = moving
    return StepTimings(first, seconds, torch.ones(2, steps, dtype=torch.float64))


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Replaces measurements of the network, in bytes/s; rank 0 measures more than rank 1."""
    rate = {"rate": 240e6 / 8}

    def probe(self: AutoMethod) -> tuple[float, float, float]:
        return 0.001, rate["rate"] * (2 - self._collectives.rank), 0.0

    monkeypatch.setattr(auto.AutoMethod, "_probe", probe)
    monkeypatch.setattr(
        auto.AutoMethod,
        "_measure_coding",
        lambda self, method_name: 0.0 if method_name == "exact" else 0.005,
    )
    return rate


def both(body: Any) -> list[Any]:
    told = ThreadMax()
    with ThreadPoolExecutor(2) as pool:
        return [one.result(30) for one in [pool.submit(body, rank, told) for rank in range(2)]]


def make_communication(
    rank: int, told: ThreadMax, text: str = "auto"
) -> tuple[Communication, FakeExchange]:
    exchange = FakeExchange(rank)
    comms = ThreadComms(World(rank=rank, size=2), torch.device("cpu"), None, both=told)
    return Communication(text, cast(GradientExchange, exchange), comms), exchange


def test_ranks_agree_and_adapt_to_slower_network(network: dict[str, float]) -> None:
    def body(rank: int, told: ThreadMax) -> Any:
        one, exchange = make_communication(rank, told)
        advice, methods = [], []
        for number in range(20):
            if number == 10 and rank == 0:
                network["rate"] = 20e6 / 8
            moving = 0.02 if number < 11 else 0.5
            moving = moving if exchange.reducer else 0.25
            advice.append(one.consider(make_timings(5 * number, 0.14, moving)))
            methods.append(exchange.reducer.name if exchange.reducer else "exact")
        other, resumed_exchange = make_communication(rank, told)
        other.load_state({**one.state(), "rests": {}})
        return (
            methods,
            advice,
            resumed_exchange.reducer.name,
            resumed_exchange.layout == exchange.layout,
        )

    (methods, advice, resumed, same_layout), other = both(body)
    assert methods == other[0]
    assert methods[:2] == ["exact", "int8"]  # each choice follows the timings of five steps
    assert methods[5:11] == ["int8"] * 6  # int4 was tried, and was no faster
    assert methods[-1] == resumed == "int4"
    assert same_layout
    told = [one for one in advice if one]
    assert len(told) == 2
    assert told[0].startswith("communication: int8, with which a step takes about 0.")
    assert "at 240 Mbit/s" in told[0]


def test_int4_starts_with_int8_warmup(network: dict[str, float]) -> None:
    """Holds for a tenth of the training, at most 20 steps, and also after resuming."""

    def body(rank: int, told: ThreadMax) -> list[Any]:
        results: list[Any] = []
        for steps, completed_steps in ((150, 0), (9, 0), (10_000, 0), (150, 11), (150, 15)):
            one, exchange = make_communication(rank, told, "int4")
            one.load_state({"method": "int8", "rests": {}} if completed_steps else {})
            one.begin(steps, completed_steps)
            methods = [exchange.reducer.name]
            for step in range(completed_steps + 1, completed_steps + 30):
                one.stepped(step)
                methods.append(exchange.reducer.name)
            results.append((methods.count("int8"), methods[-1]))
        return results

    assert both(body) == [[(15, "int4"), (0, "int4"), (20, "int4"), (4, "int4"), (0, "int4")]] * 2


@pytest.mark.parametrize(
    ("method", "sizes", "reason"),
    [
        ("int8", (1_023,) * 9, "all trained parameters have fewer than 1,024 elements"),
        ("int4", (1_500, 1_500), "the model has fewer than 4,096 trained elements"),
        ("int8", (4_000, 96), ""),
        ("exact", (3,), ""),
    ],
)
def test_method_without_effect_is_reported(
    method: str, sizes: tuple[int, ...], reason: str
) -> None:
    exchange = cast(GradientExchange, FakeExchange(0, sizes=sizes))
    comms = Comms(World(rank=0, size=2), torch.device("cpu"))
    text = Communication(method, exchange, comms).begin(150, 0)
    assert bool(text) == bool(reason)
    assert reason in text


def test_newcomer_joins_with_method_of_group(network: dict[str, float]) -> None:
    def body(rank: int, told: ThreadMax) -> list[str]:
        names = []
        for completed_steps in (3, 17):
            one, exchange = make_communication(rank, told, "int4")
            one.begin(150, 0)
            one.stepped(completed_steps)
            newcomer, other = make_communication(rank, told, "int4")
            newcomer.begin(150, 0)
            newcomer.load_replicated_state(one.replicated_state())
            newcomer.renew()
            names += [exchange.reducer.name, other.reducer.name]
        return names

    assert both(body) == [["int8", "int8", "int4", "int4"]] * 2


def test_replicated_state_keeps_exact_choice(network: dict[str, float]) -> None:
    """All ranks send the newcomer the choice, then continue alike, also with exact averages."""
    network["rate"] = 20e9 / 8

    def body(rank: int, told: ThreadMax) -> list[Any]:
        one, exchange = make_communication(rank, told)
        one.begin(1000, 0)
        for first in range(0, 20, 5):
            one.consider(make_timings(first, 0.14, 0.001))
        exchange.layout = (7, 7)
        one.load_replicated_state(one.replicated_state())
        previous_layout = exchange.layout
        one.renew()
        return [previous_layout, exchange.layout, exchange.reducer, one.is_final]

    first, _ = both(body)
    assert first == [(7, 7), (0, 0), None, True]


def test_auto_times_int4_after_warmup(network: dict[str, float]) -> None:
    network["rate"] = 20e6 / 8

    def body(rank: int, told: ThreadMax) -> list[Any]:
        one, exchange = make_communication(rank, told)
        one.begin(150, 0)
        results = []
        for first in range(0, 45, 5):
            moving = 4.0 if exchange.reducer is None else 1.0 if first < 15 else 0.25
            one.consider(make_timings(first, 0.14, moving))
            for step in range(first + 1, first + 6):
                one.stepped(step)
            results.append((exchange.reducer.name, one.is_final))
        return results

    results, other = both(body)
    assert results == other
    assert results[:3] == [("int8", False)] * 2 + [("int4", False)]
    assert results[-1] == ("int4", True)


def test_resume_probes_network_once(
    network: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, probe = [], auto.AutoMethod._probe

    def counting_probe(self: AutoMethod) -> tuple[float, float, float]:
        measured.append(self._collectives.rank)
        return probe(self)

    monkeypatch.setattr(auto.AutoMethod, "_probe", counting_probe)

    def body(rank: int, told: ThreadMax) -> list[int]:
        one, _ = make_communication(rank, told)
        for first in range(0, 50, 5):
            one.consider(make_timings(first, 0.14, 0.02))
        assert one.is_final
        other, _ = make_communication(rank, told)
        other.load_state({**one.state(), "rests": {}})
        counts = [measured.count(rank)]
        for first in (50, 100_005, 200_005):
            other.consider(make_timings(first, 0.14, 0.02))
            counts.append(measured.count(rank))
        return counts

    assert both(body) == [[2, 2, 3, 4]] * 2  # later timings are measured as before


def test_tries_other_bucket_sizes_when_steps_are_slow(
    network: dict[str, float],
) -> None:
    """Encoding that waits for a CPU is visible only in whole steps; finally the fastest stays."""
    seconds_per_bucket = 0.004

    def body(rank: int, told: ThreadMax) -> Any:
        one, exchange = make_communication(rank, told)
        buckets, advice = [], ""
        for number in range(20):
            num_buckets = exchange.nbytes // exchange.layout[0] if exchange.reducer else 0
            buckets.append(num_buckets)
            moving = 0.06 + seconds_per_bucket * num_buckets if num_buckets else 0.2
            advice = advice or one.consider(make_timings(5 * number, 0.14, moving))
        return buckets, advice, one.is_final

    network["rate"] = 400e6 / 8
    (buckets, advice, has_converged), other = both(body)
    assert (buckets, advice, has_converged) == other
    attempted = {one for one in buckets if one}
    assert len(attempted) > 1
    assert buckets[-1] == min(attempted)
    assert f"takes about {0.2 + seconds_per_bucket * buckets[-1]:.3f} s" in advice
    assert has_converged


def simulate_choices(
    network: dict[str, float], moving: dict[str, float], num_looks: int
) -> list[str]:
    """Returns the chosen method by step timings, from the communication time of each method."""

    def body(rank: int, told: ThreadMax) -> list[str]:
        one, exchange = make_communication(rank, told)
        methods = []
        for number in range(num_looks):
            name = exchange.reducer.name if exchange.reducer else "exact"
            one.consider(make_timings(5 * number, 0.14, moving[name]))
            methods.append(exchange.reducer.name if exchange.reducer else "exact")
        return methods

    methods, other = both(body)
    assert methods == other
    return methods


def test_remembers_measured_step_times(network: dict[str, float]) -> None:
    codes = {"fp16": 0.14, "int8": 0.02, "int4": 0.02}
    methods = simulate_choices(network, {"exact": 0.25, **codes}, 80)
    assert set(methods[5:]) == {"int8"}


def test_keeps_exact_if_measured_faster(network: dict[str, float]) -> None:
    methods = simulate_choices(network, {"exact": 0.01, "fp16": 0.2, "int8": 0.2, "int4": 0.2}, 30)
    assert set(methods[5:]) == {"exact"}


def test_alternating_stragglers_do_not_change_method(network: dict[str, float]) -> None:
    """A different rank is late in each step; this is not the duration of a bucket."""

    def body(rank: int, told: ThreadMax) -> list[str]:
        one, exchange = make_communication(rank, told)
        methods = []
        for number in range(12):
            timings = make_timings(5 * number, 0.1, 0.02 if exchange.reducer else 0.3)
            for step in range(5):
                slow_rank = (5 * number + step) % 2
                timings.seconds[slow_rank, step, PARTS.index("computing")] = (
                    0.3 if step % 5 > 2 else 0.1
                )
                timings.seconds[1 - slow_rank, step, PARTS.index("waiting")] = (
                    0.2 if step % 5 > 2 else 0.0
                )
            one.consider(timings)
            methods.append(exchange.reducer.name if exchange.reducer else "exact")
        return methods

    network["rate"] = 100e6 / 8
    assert set(both(body)[0][4:]) == {"int4"}


def test_cpu_handling_adds_to_step_time() -> None:
    one = measured(1_000)
    busy = replace(one, handling_s=2e-9)
    extra_seconds = {
        method_name: busy.best(method_name)[1] - one.best(method_name)[1]
        for method_name in CANDIDATES
    }
    assert extra_seconds["exact"] == pytest.approx(2e-9 * one.sent["exact"])
    assert extra_seconds["int8"] < 0.3 * extra_seconds["exact"]


def test_infers_bucket_overhead_from_step_time() -> None:
    one = measured(200)
    for bucket_seconds, buckets in ((0.01, 8), (0.03, 2)):
        seconds = replace(one, bucket_s=bucket_seconds).step("int8", buckets).seconds
        assert one.corrected("int8", buckets, seconds).bucket_s == pytest.approx(bucket_seconds)
    assert one.corrected("int8", 8, one.step("int8", 8).seconds - 0.01).bucket_s == 0


def test_first_steps_are_compressed_on_slow_network(network: dict[str, float]) -> None:
    """The slowest rank's shortest step so far decides after each of the first three steps."""

    def body(rank: int, told: ThreadMax) -> list[str]:
        one, exchange = make_communication(rank, told)
        methods = [exchange.reducer.name if exchange.reducer else "DDP"]
        for seconds in (0.9, 0.2 + 0.1 * rank, 0.14, 0.01):
            one.computed(lambda: seconds)  # noqa: B023
            methods.append(exchange.reducer.name if exchange.reducer else "DDP")
        assert not one.is_final
        assert one.state()["method"] == exchange.reducer.name if exchange.reducer else "exact"
        return methods

    network["rate"] = 240e6 / 8
    assert both(body) == [["DDP", "DDP", "fp16", "int8", "int8"]] * 2
    network["rate"] = 20e6 / 8
    assert both(body) == [["int8", "int4", "int4", "int4", "int4"]] * 2


def test_exact_run_advises_compression() -> None:
    def body(rank: int, told: ThreadMax) -> list[str]:
        one, _ = make_communication(rank, told, "exact")
        return [one.consider(make_timings(5 * number, 0.14, 0.6)) for number in range(6)]

    advice = [one for one in both(body)[0] if one]
    assert len(advice) == 1
    assert advice[0].startswith("81% of each 0.74 s step goes into sending gradients. With session")
    assert 'communication="int8") a step would take at least 0.296 s.' in advice[0]
    assert not any(
        both(
            lambda rank, told: make_communication(rank, told, "exact")[0].consider(
                make_timings(0, 0.2, 0.02, 20)
            )
        )
    )


def test_small_gradients_get_no_compression_advice() -> None:
    def body(rank: int, told: ThreadMax) -> list[str]:
        one, exchange = make_communication(rank, told, "exact")
        exchange.elements = 400
        return [one.consider(make_timings(5 * number, 0.06, 0.02)) for number in range(6)]

    advice = [one for one in both(body)[0] if one]
    assert len(advice) == 1
    assert advice[0].startswith("25% of each 80 ms step goes into sending gradients: its messages")
