"""The trial of the first steps, late updates and the order of buckets, without any network."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.futures import Future

from paceline.spec.errors import SettingError
from paceline.spec.overlap import OverlapName, refuse
from paceline.train.comms import Comms
from paceline.train.communication.exact import Exact
from paceline.train.exchange import Line, last_first
from paceline.train.late import Late, as_they_are, obstacle
from paceline.train.overlap import Overlap, Way, check_late, ways
from paceline.train.pace import PARTS, Look
from paceline.train.update import Updater
from paceline.train.world import World


@pytest.mark.parametrize(
    ("ready", "seconds", "order"),
    [
        ([], [], []),
        ([0, 1, 2, 3], [0.1] * 4, [0, 1, 2, 3]),  # the network keeps up
        ([0, 1, 2, 3], [9.0] * 4, [0, 3, 2, 1]),  # it does not: the first layer's first
        ([0, 1, 2, 3, 4], [2.0] * 5, [0, 2, 4, 3, 1]),
    ],
)
def test_the_bucket_that_is_needed_first_goes_first(ready: Any, seconds: Any, order: Any) -> None:
    assert last_first(ready, seconds) == order


def test_with_time_to_spare_the_network_is_free_for_the_last_bucket() -> None:
    ready, seconds = [0.0, 1.0, 2.0, 3.0], [1.4, 1.4, 1.4, 1.4]
    assert last_first(ready, seconds, 5.7) == [0, 1, 2, 3]  # no time: sent at 2.8
    assert last_first(ready, seconds, 7.0) == [0, 1, 3, 2]  # it waits from 2.8 to 3.0


def a_step(order: list[int], forward: float, backward: float, line: float) -> float:
    """Seconds between steps with late updates, by those of a bucket in each."""
    arrived, busy, now, ends = [0.0] * len(order), 0.0, 0.0, []
    for _ in range(8):
        for bucket in reversed(range(len(order))):
            now = max(now, arrived[bucket]) + forward
        ready = [now + backward * (bucket + 1) for bucket in range(len(order))]
        now = ready[-1]
        for bucket in order:
            busy = max(busy, ready[bucket]) + line
            arrived[bucket] = busy
        ends.append(now)
    return ends[-1] - ends[-2]


@pytest.mark.parametrize("buckets", [12, 24])
@pytest.mark.parametrize("line", [300.0, 400.0, 600.0])
def test_the_order_hides_nearly_all_that_can_be_hidden(buckets: int, line: float) -> None:
    """Milliseconds: 100 of the forward pass, 200 of the backward pass, so many of the line."""
    each, forward, backward = line / buckets, 100 / buckets, 200 / buckets
    ready = [100 + backward * (one + 1) for one in range(buckets)]
    order = last_first(ready, [each] * buckets, 300.0)
    # Beside the line: the last bucket to come is computed with, and then the next step's first.
    assert a_step(order, forward, backward, each) <= line + 6 * backward


def test_a_network_that_is_busy_for_longer_than_ranks_compute_waits_for_no_bucket() -> None:
    """A step of 7 s in which ranks compute for 3.5; sending takes 5.6 of them."""
    _, wire, _ = trial({(0, False): 7.0, (125_000, False): 7.0}, a_bucket=(1.4,) * 4)
    assert ("late", 0, 1, 2, 3) in wire.said


def test_sizes_are_tried_only_where_they_change_no_result() -> None:
    assert [one.size for one in ways(48_000_000, 2)] == [6_000_000, 3_000_000, 1_500_000]
    assert ways(48_000_000, 3) == ways(48_000_000, 16) == []
    assert ways(400, 2) == []  # nothing to divide


@pytest.mark.parametrize(
    ("asked", "besides", "told"),
    [
        ("forward", {}, "backward, auto, late"),
        ("late", {"clipped": True}, "--clip-norm"),
        ("late", {"scaled": True}, "fp16"),
        ("late", {"averaged": True}, "--ema"),
        ("late", {"compiled": True}, "--compile"),
        ("late", {"sharded": True}, "--shard"),
        ("late", {"several": True}, "several models"),
        ("late", {"communication": "powersgd:8"}, "--communication powersgd:8"),
        ("late", {"communication": "local"}, "--communication local"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused(asked: str, besides: Any, told: str) -> None:
    with pytest.raises(SettingError) as caught:
        refuse(asked, **besides)
    assert told in caught.value.render()
    for other in ("auto", "backward"):
        refuse(other, **besides)
    refuse("late", communication="int8")


def test_late_is_refused_where_parameters_cannot_be_watched() -> None:
    module, cpu = nn.Linear(2, 2), torch.device("cpu")
    check_late(module, torch.optim.SGD(module.parameters()), cpu)
    with pytest.raises(SettingError, match="late cannot be had"):
        check_late(module, torch.optim.LBFGS(module.parameters()), cpu)
    with pytest.raises(SettingError) as caught:
        check_late(module, torch.optim.SGD(module.parameters()), torch.device("cuda", 0))
    assert "cuda:0" in caught.value.render()


class Wire:
    """An exchange that notes what it is told."""

    method: Any = None
    nbytes = 4_000_000

    def __init__(self, a_bucket: tuple[float, ...]) -> None:
        self.said: list[Any] = []
        self.times = [
            SimpleNamespace(ready=one, begun=one, done=one + lasting)
            for one, lasting in enumerate(a_bucket)
        ]

    def buckets(self, size: int, first: int, *, plain: bool = False) -> None:
        self.said.append((size, first, "plain" if plain else "hook"))
        self.method = None if plain else self.method

    def as_made(self) -> None:
        self.said.append("as made")
        self.method = None

    def watched(self) -> None:
        self.said.append("watched")
        self.method = self.method or Exact(Line(None, 0, 2))

    def put_off(self, late: Any, order: Any = ()) -> None:
        self.said.append(("late", *order) if late else "in time")
        if late:
            self.method = self.method or Exact(Line(None, 0, 2))

    def stood(self, began: float, ended: float) -> None: ...


def trial(seconds: dict[tuple[int, bool], float], moving: float = 0.5, asked: OverlapName = "auto",
          ranks: int = 2, fading: bool = False, a_bucket: tuple[float, ...] = (5.0,) * 3,
          recovers: bool = False) -> tuple[Overlap, Wire, int]:  # fmt: skip
    """A whole trial of a model of 4 MB, with steps of so many seconds by size and lateness."""
    network = nn.Linear(1000, 1000, bias=False)
    updater = Updater(network, torch.optim.SGD(network.parameters(), lr=1.0), None, None, None)
    wire = Wire(a_bucket)
    updater.exchange = wire  # type: ignore[assignment]
    comms = Comms(World(0, ranks), torch.device("cpu"))
    overlap = Overlap(updater, comms, asked, recovers=recovers)
    overlap._comms = SimpleNamespace(world=comms.world, rows=lambda one: one[None])  # type: ignore[assignment]
    looks = 0
    while not overlap.done:
        a_step = seconds.get((overlap.way.size, overlap.way.late), 1.0)
        moving = 0.0 if fading and looks else moving
        parts = torch.zeros(ranks, 5, len(PARTS), dtype=torch.float64)
        parts[:, :, PARTS.index("moving")] = moving * a_step
        parts[:, :, PARTS.index("computing")] = (1 - moving) * a_step
        overlap.looked(Look(5 * looks, parts, torch.ones(ranks, 5)), 5 * looks + 5)
        looks += 1
        assert looks < 12
    return overlap, wire, looks


def test_nothing_is_tried_where_nothing_can_be_won() -> None:
    overlap, wire, looks = trial({}, moving=0.04)
    assert (overlap.way, wire.said, looks) == (Way(), [], 1)


def test_the_quickest_is_kept() -> None:
    overlap, wire, _ = trial({(250_000, False): 0.8, (125_000, False): 0.9})
    assert overlap.way == Way(250_000, 65_536)
    assert wire.said[:3] == ["watched", (125_000, 65_536, "hook"), ("late", 0, 2, 1)]
    assert wire.said[3:] == ["in time", (500_000, 125_000, "plain"), (250_000, 65_536, "plain")]


def test_late_updates_are_kept_where_they_win() -> None:
    overlap, _, _ = trial({(125_000, True): 0.7, (250_000, False): 0.8})
    assert overlap.way == Way(125_000, 65_536, late=True)
    assert len(overlap.seconds) == 3  # so clearly that other sizes are not tried
    assert trial({(0, True): 0.7}, ranks=3)[0].way.late  # and change no result with three ranks


@pytest.mark.parametrize("seconds", [{}, {(250_000, False): 0.99, (125_000, True): 1.4}])
def test_without_a_clear_winner_all_is_as_before(seconds: Any) -> None:
    overlap, wire, _ = trial(seconds)
    assert overlap.way == Way()
    assert wire.said[-1] == "as made"
    overlap._comms = Comms(World(0, 2), torch.device("cpu"))
    assert (overlap.may_be_late_by("exact"), overlap.may_be_late_by("int8")) == (False, True)


def test_no_hook_stays_after_a_trial_that_changes_nothing() -> None:
    """With three ranks all ways have the same buckets."""
    overlap, wire, _ = trial({}, ranks=3)
    assert overlap.way == Way()
    assert wire.said == ["watched", ("late", 0, 2, 1), "in time", "as made"]
    assert wire.method is None
    again, wire, looks = trial({}, ranks=3, fading=True)  # exposed, but not when it is watched
    assert again.way == Way()
    assert (wire.said, looks) == (["watched", "as made"], 2)
    assert trial({(0, True): 0.7}, ranks=3)[1].method is not None


def test_no_hook_stays_with_the_sizes_that_were_watched() -> None:
    overlap, wire, _ = trial({(125_000, False): 0.5, (125_000, True): 0.6})
    assert overlap.way == Way(125_000, 65_536)
    assert wire.said[-1] == (125_000, 65_536, "plain")
    assert wire.method is None


def test_updates_are_not_late_unasked() -> None:
    overlap, wire, _ = trial({(125_000, True): 0.1}, asked="backward")
    assert overlap.way == Way()
    assert "watched" not in wire.said


def test_where_lost_ranks_are_recovered_from_updates_are_late_only_for_who_asks() -> None:
    seconds = {(125_000, True): 0.1}
    overlap, wire, _ = trial(seconds, recovers=True)
    assert "watched" not in wire.said
    # nobody can tell in a trial without a network whether there is one
    overlap._comms = Comms(World(0, 2), torch.device("cpu"))
    assert (overlap.may_be_late(), overlap.forgone()) == (False, True)
    overlap, _, _ = trial(seconds, recovers=True, asked="late")
    assert overlap.way.late
    assert not overlap.forgone()
    assert not trial(seconds, recovers=True, asked="backward")[0].forgone()


def test_a_checkpoint_knows_the_way() -> None:
    overlap, _, _ = trial({(125_000, True): 0.7})
    kept = overlap.state_dict()
    again, wire, _ = trial({}, moving=0.0)
    again.done = False
    again.load_state_dict({**kept, "ranks": 3})  # found elsewhere
    assert not again.done
    again.load_state_dict({})  # from a time before its end
    assert not again.done
    again.load_state_dict({**kept, "late": False, "may_be_late": False})  # late ones not tried
    assert not again.done
    again.load_state_dict(kept)
    assert again.done
    assert again.way == overlap.way
    assert wire.said == [(125_000, 65_536, "plain"), ("late", 0, 2, 1)]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)


def under_way(module: nn.Module, made: torch.optim.Optimizer) -> tuple[Late, list[Future[Any]]]:
    """Each layer's gradient, of ones, is on its way."""
    late, means = Late(module, made, lambda began, ended: None), []
    late.begin()
    for number, layer in enumerate(module.children()):
        means.append(Future())
        parameters = [*as_they_are(layer)]
        for one in parameters:
            one.grad = torch.ones_like(one)
        late.sent(number, parameters, means[-1])
        means[-1].set_result(torch.ones(1))
    return late, means


def test_who_reads_a_parameter_sees_it_stepped() -> None:
    module = Two()
    before = {name: one.detach().clone() for name, one in module.named_parameters()}
    made = torch.optim.SGD(module.parameters(), lr=0.5)
    late, _ = under_way(module, made)
    assert late.pending
    late.step()
    assert not obstacle(module, made)  # they are watched by us
    made.param_groups[0]["lr"] = 99.0  # what a schedule does for the next step
    first, second = ([*as_they_are(one)] for one in module.children())
    assert torch.equal(second[0], before["second.weight"])
    assert torch.equal(module.second.weight, before["second.weight"] - 0.5)
    assert torch.equal(first[0], before["first.weight"])  # not its turn yet
    assert torch.equal(copy.deepcopy(module).first.bias, before["first.bias"] - 0.5)
    assert type(pickle.loads(pickle.dumps(module)).first._parameters) is dict
    assert all(one.grad is None for one in module.parameters())
    late.end()
    assert type(module.first._parameters) is dict
    found = dict(module.named_parameters())
    assert all(torch.equal(found[name], one - 0.5) for name, one in before.items())


@pytest.mark.parametrize(
    "read",
    [
        lambda module: module.state_dict(),
        lambda module: list(module.parameters()),
        lambda module: module(torch.ones(1, 2)),
        lambda module: module._parameters.get("weight"),
        lambda module: list(module._parameters.values()),
        lambda module: module._parameters.copy(),
    ],
)
def test_every_way_of_reading_counts(read: Any) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    before = module[0].weight.detach().clone()
    late, _ = under_way(module, torch.optim.SGD(module.parameters(), lr=0.5))
    late.step()
    read(module[0])
    assert torch.equal(next(as_they_are(module[0])), before - 0.5)
    late.end()


def test_updates_are_late_only_where_each_element_is_by_itself() -> None:
    module = Two()
    assert not obstacle(module, torch.optim.AdamW(module.parameters()))
    assert "LBFGS" in obstacle(module, torch.optim.LBFGS(module.parameters()))
    rnn = nn.LSTM(2, 2)  # reads them from a list of its own
    assert "LSTM" in obstacle(rnn, torch.optim.SGD(rnn.parameters()))
    hooked = torch.optim.SGD(module.parameters())
    hooked.register_step_post_hook(lambda *_: None)
    assert "hooks" in obstacle(module, hooked)
    rate = torch.tensor(0.1)  # a schedule changes it in place
    assert "its lr" in obstacle(module, torch.optim.AdamW(module.parameters(), lr=rate))
    made = torch.optim.SGD(module.parameters())
    assert "compiled" in obstacle(cast(nn.Module, torch.compile(module)), made)
    module.compile()
    assert "compiled" in obstacle(module, made)


def test_a_failed_exchange_is_raised_where_it_is_missed() -> None:
    module = Two()
    late, means = under_way(module, torch.optim.SGD(module.parameters(), lr=0.5))
    broken: Future[Any] = Future()
    late.sent(0, [*as_they_are(module.first)], broken)
    broken.set_exception(RuntimeError("Connection reset by peer"))
    late.step()
    assert module.second.weight is not None
    for _ in range(2):  # the second is that of who saves the model after the first
        with pytest.raises(RuntimeError, match="reset"):
            _ = module.first.weight
    del means
