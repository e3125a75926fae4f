"""Which way to communicate is taken, and what is said of it."""

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
    """Two ranks; codes at 1.5 GB/s there and back."""
    elements, line = int(megabytes * 250_000), ReduceContext(None, 0, 2)
    sent = {way: REDUCERS[way](line).bytes_sent(elements, 2) for way in CANDIDATES}
    coding = {way: 0.0 if way == "exact" else megabytes / 1500 for way in CANDIDATES}
    return Measurement(computing, 4 * elements, 0.001, megabits * 125_000, sent, coding)


@pytest.mark.parametrize(
    ("megabits", "way"),
    [
        (10_000, "exact"),
        (1_000, "exact"),
        (450, "fp16"),
        (200, "int8"),
        (100, "int4"),
        (20, "int4"),
    ],
)
def test_the_way_that_leaves_out_least_of_those_that_hide_their_bytes(
    megabits: float, way: str
) -> None:
    assert choose(measured(megabits)).method == way


def test_a_forecast_is_never_above_plain_exact_averages() -> None:
    for megabits in (1, 20, 100, 1_000, 10_000, 100_000):
        for computing in (0.001, 0.1, 10.0):
            one = choose(measured(megabits, computing=computing))
            assert one.seconds[one.method] <= one.seconds["exact"] * 1.0001 or one.method == "exact"


def test_slow_coding_is_not_taken() -> None:
    one = measured(2_000)
    slow = Measurement(
        one.computing_s, one.gradient_bytes, one.latency_s, one.bytes_per_s, one.sent,
        {way: 0.0 if way == "exact" else 1.0 for way in CANDIDATES},
    )  # fmt: skip
    assert choose(slow).method == "exact"


def test_long_ways_want_few_buckets() -> None:
    near = measured(100)
    far = Measurement(
        near.computing_s, near.gradient_bytes, 0.04, near.bytes_per_s, near.sent, near.coding_s
    )
    assert far.best("int8")[0] < near.best("int8")[0]


def test_it_stays_with_what_is_nearly_as_good() -> None:
    ways = [choose(measured(megabits)).method for megabits in range(60, 400, 5)]
    changes = [at for at, pair in enumerate(itertools.pairwise(ways)) if pair[0] != pair[1]]
    assert changes
    for at in changes:  # a little slower than where it changes, it would not change back
        assert choose(measured(60 + 5 * at), present=ways[at + 1]).method == ways[at + 1]


@dataclass
class Standing:
    """An exchange without a model."""

    rank: int
    elements: int = 2_000_000
    reducer: Any = None
    former_reducer: Any = None
    layout: tuple[int, int] = (0, 0)

    @property
    def nbytes(self) -> int:
        return 4 * self.elements

    def context(self) -> ReduceContext:
        return ReduceContext(None, self.rank, 2)

    def set_bucket_sizes(self, size: int, first: int) -> None:
        self.layout = size, first

    def reset(self) -> None:
        self.layout, self.reducer = (0, 0), None


class Both:
    """What two threads tell each other."""

    def __init__(self) -> None:
        self._told: dict[int, list[float]] = {}
        self._barrier = threading.Barrier(2)

    def most(self, rank: int, vector: Tensor) -> list[float]:
        self._told[rank] = [float(one) for one in vector]
        self._barrier.wait(20)
        found = [max(pair) for pair in zip(self._told[0], self._told[1], strict=True)]
        self._barrier.wait(20)
        return found


@dataclass(slots=True)
class Told(Comms):
    """Between threads."""

    both: Both | None = None

    def max(self, vector: Tensor) -> list[float]:
        assert self.both is not None
        return self.both.most(self.world.rank, vector)


def look(first: int, computing: float, moving: float, steps: int = 5) -> StepTimings:
    seconds = torch.zeros(2, steps, len(PARTS), dtype=torch.float64)
    seconds[:, :, PARTS.index("computing")] = computing
    seconds[:, :, PARTS.index("moving")] = moving
    return StepTimings(first, seconds, torch.ones(2, steps, dtype=torch.float64))


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What ranks measure of it: bytes a second, as rank 1 sees it; rank 0 sees a better one."""
    rate = {"rate": 240e6 / 8}

    def probe(self: AutoMethod) -> tuple[float, float, float]:
        return 0.001, rate["rate"] * (2 - self._collectives.rank), 0.0

    monkeypatch.setattr(auto.AutoMethod, "_probe", probe)
    monkeypatch.setattr(
        auto.AutoMethod, "_measure_coding", lambda self, way: 0.0 if way == "exact" else 0.005
    )
    return rate


def both(body: Any) -> list[Any]:
    told = Both()
    with ThreadPoolExecutor(2) as pool:
        return [one.result(30) for one in [pool.submit(body, rank, told) for rank in range(2)]]


def made(rank: int, told: Both, text: str = "auto") -> tuple[Communication, Standing]:
    exchange = Standing(rank)
    comms = Told(World(rank=rank, size=2), torch.device("cpu"), None, both=told)
    return Communication(text, cast(GradientExchange, exchange), comms), exchange


def test_all_ranks_decide_alike_and_look_again(network: dict[str, float]) -> None:
    def body(rank: int, told: Both) -> Any:
        one, exchange = made(rank, told)
        said, ways = [], []
        for number in range(20):
            if number == 10 and rank == 0:
                network["rate"] = 20e6 / 8
            moving = 0.02 if number < 11 else 0.5
            moving = moving if exchange.reducer else 0.25
            said.append(one.consider(look(5 * number, 0.14, moving)))
            ways.append(exchange.reducer.name if exchange.reducer else "exact")
        other, again = made(rank, told)
        other.load_state({**one.state(), "rests": {}})
        return ways, said, again.reducer.name, again.layout == exchange.layout

    (ways, said, resumed, alike), other = both(body)
    assert ways == other[0]
    assert ways[:2] == ["exact", "int8"]  # a look at five steps comes before each choice
    assert ways[5:11] == ["int8"] * 6  # int4 was tried, and no quicker
    assert ways[-1] == resumed == "int4"
    assert alike
    told = [one for one in said if one]
    assert len(told) == 2
    assert told[0].startswith("communication: int8, with which a step takes about 0.")
    assert "at 240 Mbit/s" in told[0]


def test_the_first_steps_are_not_said_in_4_bits(network: dict[str, float]) -> None:
    """A tenth of the training, and at most 20 steps; also where it goes on."""

    def body(rank: int, told: Both) -> list[Any]:
        found: list[Any] = []
        for steps, done in ((150, 0), (9, 0), (10_000, 0), (150, 11), (150, 15)):
            one, exchange = made(rank, told, "int4")
            one.load_state({"method": "int8", "rests": {}} if done else {})
            one.begin(steps, done)
            ways = [exchange.reducer.name]
            for step in range(done + 1, done + 30):
                one.stepped(step)
                ways.append(exchange.reducer.name)
            found.append((ways.count("int8"), ways[-1]))
        return found

    assert both(body) == [[(15, "int4"), (0, "int4"), (20, "int4"), (4, "int4"), (0, "int4")]] * 2


def test_a_newcomer_says_its_first_step_as_the_others_do(network: dict[str, float]) -> None:
    def body(rank: int, told: Both) -> list[str]:
        names = []
        for done in (3, 17):
            one, exchange = made(rank, told, "int4")
            one.begin(150, 0)
            one.stepped(done)
            newcomer, other = made(rank, told, "int4")
            newcomer.begin(150, 0)
            newcomer.load_replicated_state(one.replicated_state())
            newcomer.renew()
            names += [exchange.reducer.name, other.reducer.name]
        return names

    assert both(body) == [["int8", "int8", "int4", "int4"]] * 2


def test_a_newcomer_takes_what_auto_chose_when_all_begin_anew(network: dict[str, float]) -> None:
    """What is sent for it, all send; and then they go on alike, also with exact averages."""
    network["rate"] = 20e9 / 8

    def body(rank: int, told: Both) -> list[Any]:
        one, exchange = made(rank, told)
        one.begin(1000, 0)
        for first in range(0, 20, 5):
            one.consider(look(first, 0.14, 0.001))
        exchange.layout = (7, 7)
        one.load_replicated_state(one.replicated_state())
        before = exchange.layout
        one.renew()
        return [before, exchange.layout, exchange.reducer, one.is_final]

    first, _ = both(body)
    assert first == [(7, 7), (0, 0), None, True]


def test_auto_judges_4_bits_by_steps_that_are_said_so(network: dict[str, float]) -> None:
    network["rate"] = 20e6 / 8

    def body(rank: int, told: Both) -> list[Any]:
        one, exchange = made(rank, told)
        one.begin(150, 0)
        found = []
        for first in range(0, 45, 5):
            moving = 4.0 if exchange.reducer is None else 1.0 if first < 15 else 0.25
            one.consider(look(first, 0.14, moving))
            for step in range(first + 1, first + 6):
                one.stepped(step)
            found.append((exchange.reducer.name, one.is_final))
        return found

    found, other = both(body)
    assert found == other
    assert found[:3] == [("int8", False)] * 2 + [("int4", False)]
    assert found[-1] == ("int4", True)


def test_a_resumed_run_measures_the_line_once_before_its_first_look(
    network: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, probe = [], auto.AutoMethod._probe

    def counted(self: AutoMethod) -> tuple[float, float, float]:
        measured.append(self._collectives.rank)
        return probe(self)

    monkeypatch.setattr(auto.AutoMethod, "_probe", counted)

    def body(rank: int, told: Both) -> list[int]:
        one, _ = made(rank, told)
        for first in range(0, 50, 5):
            one.consider(look(first, 0.14, 0.02))
        assert one.is_final
        other, _ = made(rank, told)
        other.load_state({**one.state(), "rests": {}})
        counts = [measured.count(rank)]
        for first in (50, 100_005, 200_005):
            other.consider(look(first, 0.14, 0.02))
            counts.append(measured.count(rank))
        return counts

    assert both(body) == [[2, 2, 3, 4]] * 2  # later looks measure as before


def test_where_steps_take_longer_than_expected_other_buckets_are_tried(
    network: dict[str, float],
) -> None:
    """Codes that wait for a processor show in steps alone; in the end the quickest stays."""
    a_bucket = 0.004

    def body(rank: int, told: Both) -> Any:
        one, exchange = made(rank, told)
        buckets, said = [], ""
        for number in range(20):
            used = exchange.nbytes // exchange.layout[0] if exchange.reducer else 0
            buckets.append(used)
            moving = 0.06 + a_bucket * used if used else 0.2
            said = said or one.consider(look(5 * number, 0.14, moving))
        return buckets, said, one.is_final

    network["rate"] = 400e6 / 8
    (buckets, said, settled), other = both(body)
    assert (buckets, said, settled) == other
    tried = {one for one in buckets if one}
    assert len(tried) > 1
    assert buckets[-1] == min(tried)
    assert f"takes about {0.2 + a_bucket * buckets[-1]:.3f} s" in said
    assert settled


def settled_one(network: dict[str, float], moving: dict[str, float], looks: int) -> list[str]:
    """Ways by look, with steps that compute for 0.14 s and move bytes for so long by each way."""

    def body(rank: int, told: Both) -> list[str]:
        one, exchange = made(rank, told)
        ways = []
        for number in range(looks):
            name = exchange.reducer.name if exchange.reducer else "exact"
            one.consider(look(5 * number, 0.14, moving[name]))
            ways.append(exchange.reducer.name if exchange.reducer else "exact")
        return ways

    ways, other = both(body)
    assert ways == other
    return ways


def test_what_was_tried_holds_when_it_looks_again(network: dict[str, float]) -> None:
    codes = {"fp16": 0.14, "int8": 0.02, "int4": 0.02}
    ways = settled_one(network, {"exact": 0.25, **codes}, 80)
    assert set(ways[5:]) == {"int8"}


def test_exact_averages_that_were_seen_to_be_quicker_stay(network: dict[str, float]) -> None:
    ways = settled_one(network, {"exact": 0.01, "fp16": 0.2, "int8": 0.2, "int4": 0.2}, 30)
    assert set(ways[5:]) == {"exact"}


def test_ranks_that_are_late_in_turn_speak_for_no_other_way(network: dict[str, float]) -> None:
    """In each step another one; that is no time of a bucket."""

    def body(rank: int, told: Both) -> list[str]:
        one, exchange = made(rank, told)
        ways = []
        for number in range(12):
            some = look(5 * number, 0.1, 0.02 if exchange.reducer else 0.3)
            for step in range(5):
                late = (5 * number + step) % 2
                some.seconds[late, step, PARTS.index("computing")] = 0.3 if step % 5 > 2 else 0.1
                some.seconds[1 - late, step, PARTS.index("waiting")] = 0.2 if step % 5 > 2 else 0.0
            one.consider(some)
            ways.append(exchange.reducer.name if exchange.reducer else "exact")
        return ways

    network["rate"] = 100e6 / 8
    assert set(both(body)[0][4:]) == {"int4"}


def test_a_processor_that_moves_bytes_does_not_compute_meanwhile() -> None:
    one = measured(1_000)
    busy = replace(one, handling_s=2e-9)
    more = {way: busy.best(way)[1] - one.best(way)[1] for way in CANDIDATES}
    assert more["exact"] == pytest.approx(2e-9 * one.sent["exact"])
    assert more["int8"] < 0.3 * more["exact"]


def test_what_a_bucket_takes_is_found_from_a_step() -> None:
    one = measured(200)
    for each, buckets in ((0.01, 8), (0.03, 2)):
        seconds = replace(one, bucket_s=each).step("int8", buckets).seconds
        assert one.corrected("int8", buckets, seconds).bucket_s == pytest.approx(each)
    assert one.corrected("int8", 8, one.step("int8", 8).seconds - 0.01).bucket_s == 0


def test_the_first_steps_are_not_exact_where_that_is_dear(network: dict[str, float]) -> None:
    """A choice after each of three steps, the slowest rank's, by the shortest of them."""

    def body(rank: int, told: Both) -> list[str]:
        one, exchange = made(rank, told)
        ways = [exchange.reducer.name if exchange.reducer else "DDP"]
        for seconds in (0.9, 0.2 + 0.1 * rank, 0.14, 0.01):
            one.computed(lambda: seconds)  # noqa: B023
            ways.append(exchange.reducer.name if exchange.reducer else "DDP")
        assert not one.is_final
        assert one.state()["method"] == exchange.reducer.name if exchange.reducer else "exact"
        return ways

    network["rate"] = 240e6 / 8
    assert both(body) == [["DDP", "DDP", "fp16", "int8", "int8"]] * 2
    network["rate"] = 20e6 / 8
    assert both(body) == [["int8", "int4", "int4", "int4", "int4"]] * 2


def test_who_asks_for_nothing_is_told_what_there_is() -> None:
    def body(rank: int, told: Both) -> list[str]:
        one, _ = made(rank, told, "exact")
        return [one.consider(look(5 * number, 0.14, 0.6)) for number in range(6)]

    said = [one for one in both(body)[0] if one]
    assert len(said) == 1
    assert said[0].startswith("81% of each 0.74 s step goes into sending gradients. With session")
    assert 'communication="int8") a step would take at least 0.296 s.' in said[0]
    assert not any(
        both(lambda rank, told: made(rank, told, "exact")[0].consider(look(0, 0.2, 0.02, 20)))
    )


def test_of_short_messages_fewer_bytes_are_not_advised() -> None:
    def body(rank: int, told: Both) -> list[str]:
        one, exchange = made(rank, told, "exact")
        exchange.elements = 400
        return [one.consider(look(5 * number, 0.06, 0.02)) for number in range(6)]

    said = [one for one in both(body)[0] if one]
    assert len(said) == 1
    assert said[0].startswith("25% of each 80 ms step goes into sending gradients: its messages")
