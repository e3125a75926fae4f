"""Numbers in fewer bits, and the methods that send them; ranks are threads here."""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from each_case import each_case
from paceline.train.reduce import codecs
from paceline.train.reduce.buckets import _ReduceThread
from paceline.train.reduce.codecs import BLOCK, Codec
from paceline.train.reduce.collectives import Collectives, ReduceContext, pack, unpack
from paceline.train.reduce.local import Local
from paceline.train.reduce.reducer import Bucket
from paceline.train.reduce.registry import REDUCERS

CODES = {"fp16": codecs.FP16, "bf16": codecs.BF16, "int8": codecs.INT8, "int4": codecs.INT4}
WORST = {"fp16": 2**-11, "bf16": 2**-8, "int8": 1 / 254, "int4": 1 / 14}  # of a block's largest


def told(code: Codec, values: Tensor) -> tuple[Tensor, Tensor]:
    """What is understood, and what is left to say."""
    message = torch.zeros(code.message_bytes(len(values)), dtype=torch.uint8)
    rest, out = values.clone(), torch.empty_like(values)
    code.encode(rest, message, keep_error=True)
    code.decode(message, out)
    return out, rest


@pytest.mark.parametrize("name", CODES)
def test_a_code_says_nearly_what_it_is_given_and_leaves_the_rest(name: str) -> None:
    torch.manual_seed(0)
    values = torch.randn(300 * BLOCK) * torch.logspace(-20, 10, 300).repeat_interleave(BLOCK)
    out, rest = told(CODES[name], values)
    largest = values.view(-1, BLOCK).abs().amax(1, keepdim=True)
    assert bool(((out - values).view(-1, BLOCK).abs() <= largest * WORST[name] * 1.001).all())
    assert bool(((out + rest - values).view(-1, BLOCK).abs() <= largest * 1e-6).all())


@pytest.mark.parametrize("name", CODES)
def test_zeros_extremes_and_what_is_not_finite(name: str) -> None:
    values = torch.zeros(5 * BLOCK)
    values[BLOCK] = 1e-38
    values[2 * BLOCK : 3 * BLOCK] = 3e38
    values[3 * BLOCK + 7], values[4 * BLOCK + 9] = math.inf, math.nan
    out, rest = told(CODES[name], values)
    blocks = out.view(-1, BLOCK)
    assert not blocks[:2].abs().gt(1e-37).any()
    assert torch.allclose(blocks[2], values[2 * BLOCK : 3 * BLOCK], rtol=0.01)
    assert not blocks[3:].isfinite().all(1).any()
    assert rest.isfinite().all()


def test_sizes_are_what_they_say() -> None:
    sizes = {name: code.message_bytes(1024 * BLOCK) for name, code in CODES.items()}
    full = 4 * 1024 * BLOCK
    ratios = {name: round(full / size, 2) for name, size in sizes.items()}
    assert ratios == {"fp16": 1.98, "bf16": 2.0, "int8": 3.94, "int4": 7.76}


class Meeting:
    """Collectives of threads: everybody leaves something, then everybody looks."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self._left = ranks, {}
        self._barrier = threading.Barrier(ranks)

    def __call__(self, rank: int, thing: Any) -> list[Any]:
        self._left[rank] = thing
        self._barrier.wait(20)
        every = [self._left[one] for one in range(self.ranks)]
        self._barrier.wait(20)
        return every


class Threads(Collectives):
    """A wire between threads."""

    def __init__(self, context: ReduceContext, meeting: Meeting) -> None:
        super().__init__(context)
        self._meet = lambda thing: meeting(context.rank, thing)

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self._meet(tensor.clone())).sum(0))

    ring_all_reduce = all_reduce

    def all_to_all(self, messages: Tensor, codes: int = 0) -> Tensor:
        every = self._meet([pack(one, codes) for one in messages])
        return self._unpacked([rows[self.rank] for rows in every], codes, messages[0])

    def all_gather(self, message: Tensor, codes: int = 0) -> Tensor:
        return self._unpacked(self._meet(pack(message, codes)), codes, message)

    def _unpacked(self, came: list[Tensor], codes: int, like: Tensor) -> Tensor:
        found = torch.stack([torch.empty_like(like) for _ in came])
        for one, row in zip(came, found, strict=True):
            unpack(one, codes, row)
        return found

    def gather(self, message: Tensor) -> Tensor | None:
        every = self._meet(message.clone())
        return torch.stack(every) if self.rank == 0 else None


SHAPES = [(60, 70), (60,), (2, 3, 40, 30), (7,), (5000,), (3, 3)]


class Rank:
    """One rank's method and parameters."""

    def __init__(
        self,
        name: str,
        rank: int,
        meeting: Meeting,
        dtype: torch.dtype,
        *,
        void: bool = False,
        unused: bool = False,
    ) -> None:
        self.parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
        names = {one: f"layer{number}" for number, one in enumerate(self.parameters)}
        context = ReduceContext(None, rank, meeting.ranks, names, void, unused)
        self.method = REDUCERS[name](context, Threads(context, meeting))
        self.meeting = meeting

    def average(self, gradients: list[Tensor], layout: list[list[int]]) -> list[Tensor]:
        """The means of one step, with these parameters in each bucket."""
        means = list(gradients)
        for number, members in enumerate(layout):
            flat = torch.cat([gradients[one].reshape(-1) for one in members])
            sizes = [gradients[one].numel() for one in members]
            views = [
                part.view(gradients[one].shape)
                for part, one in zip(flat.split(sizes), members, strict=True)
            ]
            bucket = Bucket(
                number,
                flat,
                [self.parameters[one] for one in members],
                views,
                number == len(layout) - 1,
            )
            self.method.all_reduce(bucket)
            for one, view in zip(members, views, strict=True):
                means[one] = view
        return means


TWO = [[5, 4, 3], [2, 1, 0]]
ONE = [[5, 4, 3, 2, 1, 0]]


def drawn(rank: int, step: int, dtype: torch.dtype) -> list[Tensor]:
    source = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randn(shape, generator=source).to(dtype) * 1e-3 for shape in SHAPES]


def world(ranks: int, body: Callable[[int, Meeting], Any]) -> list[Any]:
    """What each rank's thread gives."""
    meeting = Meeting(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        return [one.result(30) for one in [pool.submit(body, r, meeting) for r in range(ranks)]]


def steps(
    name: str, ranks: int, count: int, dtype: torch.dtype = torch.float32, **more: Any
) -> list[Any]:
    """Means of each step on each rank, and the state at the end."""
    begin, state, layout = more.get("begin", 0), more.get("state"), more.get("layout", TWO)
    gradients = more.get("gradients", drawn)

    def body(rank: int, meeting: Meeting) -> Any:
        mine = Rank(name, rank, meeting, dtype)
        if state is not None:
            mine.method.load_state(state)
        means = [
            mine.average(gradients(rank, step, dtype), layout)
            for step in range(begin, begin + count)
        ]
        return means, mine.method.state()

    return world(ranks, body)


def equal(some: list[list[Tensor]], others: list[list[Tensor]]) -> bool:
    pairs = [pair for both in zip(some, others, strict=True) for pair in zip(*both, strict=True)]
    return all(torch.equal(one, other) for one, other in pairs)


def true_mean(ranks: int, step: int) -> Tensor:
    every = [drawn(rank, step, torch.float64) for rank in range(ranks)]
    return torch.stack([whole(one) for one in every]).mean(0)


def whole(tensors: list[Tensor]) -> Tensor:
    return torch.cat([one.double().reshape(-1) for one in tensors])


@each_case("ranks", [1, 2, 3, 4])
@each_case("name", REDUCERS)
def test_all_ranks_get_the_same_bits_and_nothing_is_lost(name: str, ranks: int) -> None:
    """Over the steps the sum of the means comes to that of the gradients: a rest is said later."""
    found = steps(name, ranks, 12)
    assert all(equal(found[0][0], one[0]) for one in found)
    got = sum(whole(means) for means in found[0][0])
    true = sum(true_mean(ranks, step) for step in range(12))
    limit = {"exact": 1e-6, "fp16": 1e-3, "bf16": 1e-3, "int8": 3e-3, "int4": 0.06}
    if name in limit:
        assert float((got - true).abs().max() / true.abs().max()) < limit[name]


@pytest.mark.parametrize("name", REDUCERS)
def test_a_resumed_run_goes_on_to_the_bit(name: str) -> None:
    unbroken = steps(name, 3, 8)
    first = steps(name, 3, 5)
    at_once = steps(name, 3, 0, state=first[0][1])  # saved again before anything is said
    then = steps(name, 3, 3, begin=5, state=at_once[0][1])
    assert equal(unbroken[0][0][5:], then[0][0])


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_another_number_of_ranks_says_what_was_left(name: str, ranks: int) -> None:
    """What was left of 3 ranks comes as part of the next mean."""
    left = steps(name, 3, 6)[0][1]

    def nothing(rank: int, step: int, dtype: torch.dtype) -> list[Tensor]:
        return [torch.zeros(shape, dtype=dtype) for shape in SHAPES]

    after = steps(name, ranks, 4, state=left, gradients=nothing)
    said = sum(whole(means) for means in after[0][0])
    rest = torch.cat([left[f"layer{n}"].double().mean(0).reshape(-1) for n in range(len(SHAPES))])
    assert float((said - rest).abs().max()) < 0.02 * float(rest.abs().max())
    assert float(rest.abs().max()) > 0


@pytest.mark.parametrize(("before", "ranks"), [(3, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_those_that_are_left_go_on_with_what_each_had_to_say(
    name: str, before: int, ranks: int
) -> None:
    """Who comes begins with nothing."""

    def train(rank: int, meeting: Meeting) -> Rank:
        mine = Rank(name, rank, meeting, torch.float64, void=True)
        for step in range(4):
            mine.average(drawn(rank, step, torch.float64), TWO)
            mine.method.commit()
        return mine

    formers = world(before, train)
    owed = sum(rests(one) for one in formers[:ranks]) / before

    def go_on(rank: int, meeting: Meeting) -> Any:
        mine = Rank(name, rank, meeting, torch.float64, void=True)
        if rank < before:
            mine.method.adopt(formers[rank].method)
        else:
            mine.method.load_replicated_state(formers[0].method.replicated_state())
        left = rests(mine)
        means = mine.average([torch.zeros(one, dtype=torch.float64) for one in SHAPES], TWO)
        mine.method.commit()
        return left, means, rests(mine)

    found = world(ranks, go_on)
    assert (
        float((sum(one[0] for one in found) / ranks - owed).abs().max()) < 3e-3 * owed.abs().max()
    )
    assert equal([found[0][1]], [found[-1][1]])
    still = sum(one[2] for one in found) / ranks
    assert float((whole(found[0][1]) + still - owed).abs().max()) < 6e-3 * owed.abs().max()
    assert ranks > 1 or not still.any()


def rests(rank: Rank) -> Tensor:
    """What a rank has to say, whole."""
    kept = rank.method._feedback
    found = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for number, one in enumerate(found):
        if f"layer{number}" in kept._views:
            one += kept._views[f"layer{number}"].committed
    return whole(found)


@pytest.mark.parametrize("name", REDUCERS)
def test_a_void_pass_leaves_no_trace(name: str) -> None:
    """It ends after the first of its buckets, and its gradients come again in other shares."""

    def body(rank: int, meeting: Meeting, *, void: bool) -> list[list[Tensor]]:
        mine = Rank(name, rank, meeting, torch.float32, void=True)
        means = []
        for step in range(5):
            if void and step == 3:
                mine.average(drawn(rank, 100, torch.float32), TWO[:1])
                mine.method.rollback()
            means.append(mine.average(drawn(rank, step, torch.float32), TWO))
            mine.method.commit()
        return means

    struck, plain = (world(3, partial(body, void=void)) for void in (True, False))
    assert equal(struck[0], plain[0])


def test_the_outer_state_outlives_another_number_of_ranks() -> None:
    """Its momentum is everybody's; what 8 bits have not said yet is the same in the mean."""

    def apart(rank: int, meeting: Meeting) -> Any:
        mine = Rank("local", rank, meeting, torch.float32)
        method = mine.method
        assert isinstance(method, Local)
        method.local_steps, _ = 2, method.set_length(400)
        method.first_local = 2
        for step in range(6):
            mine.average(drawn(rank, step, torch.float32), TWO)
            with torch.no_grad():
                for parameter, way in zip(
                    mine.parameters, drawn(rank, 10 + step, torch.float32), strict=True
                ):
                    parameter -= way
            if method.is_due:
                method.synchronise()
        return method.state()

    state = world(3, apart)[0]

    def resumed(rank: int, meeting: Meeting) -> Any:
        mine = Rank("local", rank, meeting, torch.float32)
        mine.method.load_state(state)
        return mine.method.state(), mine.method._changes._feedback._views

    found = world(2, resumed)
    for theirs, of in found:
        assert theirs["steps"] == state["steps"] == 6
        for name, momentum in state["momentum"].items():
            assert momentum.any()
            assert torch.equal(theirs["momentum"][name], momentum)
        for name, rows in state["ways"].items():
            assert torch.allclose(
                of[name].committed.float(), rows.float().mean(0), rtol=0.01, atol=1e-7
            )


@pytest.mark.parametrize("name", REDUCERS)
def test_what_is_left_outlives_other_buckets(name: str) -> None:
    def body(rank: int, meeting: Meeting) -> Any:
        mine = Rank(name, rank, meeting, torch.float32)
        layouts = [TWO, ONE, [[5, 4], [3, 2], [1, 0]], ONE]
        return [mine.average(drawn(rank, n, torch.float32), one) for n, one in enumerate(layouts)]

    found = world(3, body)
    assert equal(found[0], found[1])
    got = sum(whole(means) for means in found[0])
    true = sum(true_mean(3, step) for step in range(4))
    if name in ("exact", "bf16", "int8"):
        assert float((got - true).abs().max() / true.abs().max()) < 0.01


@pytest.mark.parametrize(("name", "says"), [("int4", True), ("fp16", False)])
def test_only_who_says_what_is_left_takes_it_over(name: str, says: bool) -> None:
    def body(rank: int, meeting: Meeting) -> Any:
        before, mine = (Rank(one, rank, meeting, torch.float32) for one in ("int8", name))
        before.average(drawn(rank, 0, torch.float32), TWO)
        mine.method.adopt(before.method)
        return mine.method.state()

    assert [bool(state) for state in world(2, body)] == [says, False]  # rank 0 has those of all


@each_case(("where", "what"), [(0, math.inf), (1, -math.inf), (4, math.nan)])
@each_case("name", REDUCERS)
def test_what_is_not_finite_reaches_every_rank_and_is_forgotten(
    name: str, where: int, what: float
) -> None:
    def spoiled(rank: int, step: int, dtype: torch.dtype) -> list[Tensor]:
        found = drawn(rank, step, dtype)
        if step == 2 and rank == 1:
            found[where].view(-1)[5] = what
        return found

    for means, _ in steps(name, 3, 5, gradients=spoiled):
        finite = [all(bool(one.isfinite().all()) for one in step) for step in means]
        assert finite == [True, True, False, True, True]


@each_case("dtype", [torch.float64, torch.bfloat16, torch.float16])
@each_case("name", REDUCERS)
def test_parameters_of_other_precisions(name: str, dtype: torch.dtype) -> None:
    found = steps(name, 3, 3, dtype)
    assert all(equal(found[0][0], one[0]) for one in found)
    mean = torch.cat([one.reshape(-1) for one in found[0][0][0]])
    assert mean.dtype == dtype
    true = true_mean(3, 0)
    assert float((mean.double() - true).abs().max() / true.abs().max()) < 0.2


@pytest.mark.parametrize("name", REDUCERS)
def test_nothing_to_say_stays_nothing(name: str) -> None:
    def nothing(rank: int, step: int, dtype: torch.dtype) -> list[Tensor]:
        return [torch.zeros(shape, dtype=dtype) for shape in SHAPES]

    for means, _ in steps(name, 2, 3, gradients=nothing):
        assert not any(bool(one.any()) for step in means for one in step)


@pytest.mark.parametrize("name", REDUCERS)
def test_small_parameters_and_buckets_are_exact(name: str) -> None:
    found = steps(name, 3, 1, layout=[[5], [4, 3, 2, 1, 0]])[0][0][0]
    for number in (1, 3, 5):
        true = torch.stack([drawn(rank, 0, torch.float32)[number] for rank in range(3)]).mean(0)
        assert torch.allclose(found[number], true, rtol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_what_was_not_said_is_kept(name: str, ranks: int) -> None:
    """Means and what is left come to the gradients."""
    found = steps(name, ranks, 6)
    state = found[0][1]
    left = torch.cat([state[f"layer{n}"].double().mean(0).reshape(-1) for n in range(len(SHAPES))])
    got = sum(whole(means) for means in found[0][0])
    true = sum(true_mean(ranks, step) for step in range(6))
    assert float((got + left - true).abs().max() / true.abs().max()) < 2e-3


@pytest.mark.parametrize("void", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_of_what_no_rank_has_used_all_is_still_to_be_said(
    name: str, ranks: int, void: bool
) -> None:
    """DDP gives such a parameter no mean: what it got and what is left come to its gradients."""

    def gradients(rank: int, step: int) -> list[Tensor]:
        """One parameter is used in turn by all, by the last rank, and by nobody."""
        found = drawn(rank, step, torch.float64)
        if step % 3 == 2 or (step % 3 == 1 and rank < ranks - 1):
            found[0].zero_()
        return found

    def body(rank: int, meeting: Meeting) -> Any:
        mine = Rank(name, rank, meeting, torch.float64, void=void, unused=True)
        got = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        for step in range(6):
            for number, mean in enumerate(mine.average(gradients(rank, step), TWO)):
                if number or step % 3 < 2:
                    got[number] += mean
                else:
                    assert not mean.any()
            mine.method.commit()
        return whole(got), rests(mine)

    found = world(ranks, body)
    true = sum(whole(gradients(rank, step)) for rank in range(ranks) for step in range(6)) / ranks
    left = sum(one[1] for one in found) / ranks
    assert all(torch.equal(one[0], found[0][0]) for one in found)
    assert float((found[0][0] + left - true).abs().max() / true.abs().max()) < 2e-3
    assert bool(left[: math.prod(SHAPES[0])].any()) == (ranks > 1)


def test_bytes_of_other_precisions_are_counted() -> None:
    wide = ReduceContext(None, 0, 2, element_bytes=8.0)
    sent = {name: made(wide).bytes_sent(1000, 2) for name, made in REDUCERS.items()}
    assert sent["exact"] == 8000
    usual = REDUCERS["int8"](ReduceContext(None, 0, 2)).bytes_sent(1000, 2)
    assert sent["int8"] == usual  # codes say as much of wide numbers


def test_ranks_that_step_alone_meet() -> None:
    """They come to the mean of where they are, and a little further."""

    def body(rank: int, meeting: Meeting) -> Any:
        mine = Rank("local", rank, meeting, torch.float32)
        method = mine.method
        assert isinstance(method, Local)
        method.local_steps = 3
        said = method.set_length(20)
        places, buffer = [], torch.full((3,), float(rank))
        for step in range(12):
            gradients = mine.average(drawn(rank, step, torch.float32), TWO)
            with torch.no_grad():
                for parameter, gradient in zip(mine.parameters, gradients, strict=True):
                    parameter -= gradient
            if method.is_due or step == 11:
                method.synchronise([buffer])
            places.append(whole([one.detach() for one in mine.parameters]))
        return places, said, buffer

    (first, said, buffer), *others = world(3, body)
    alike = [all(torch.equal(first[step], one[0][step]) for one in others) for step in range(12)]
    assert alike == [step in (0, 1, 4, 7, 10, 11) for step in range(12)]
    assert "costs loss" in said
    assert torch.allclose(buffer, torch.ones(3))
    way = sum(true_mean(3, step) for step in (2, 3, 4))
    moved = first[1] - first[4]
    assert float((moved - 0.9 * way).norm() / way.norm()) < 0.02  # its momentum is 0 here


def test_who_comes_to_ranks_apart_begins_where_they_last_met() -> None:
    """Their models and what each had left to say stay; the next mean is that of all."""

    def step(mine: Rank, rank: int, number: int) -> None:
        gradients = mine.average(drawn(rank, number, torch.float32), TWO)
        with torch.no_grad():
            for parameter, gradient in zip(mine.parameters, gradients, strict=True):
                parameter -= gradient
        mine.method.commit()

    def before(rank: int, meeting: Meeting) -> Rank:
        mine = Rank("local", rank, meeting, torch.float32, void=True)
        cast(Local, mine.method).first_local = 2
        for number in range(5):
            step(mine, rank, number)
            if number == 2:
                cast(Local, mine.method).synchronise()
        return mine

    formers = world(2, before)
    at, alike = deepcopy(
        (cast(Local, formers[0].method).synced_parameters(), formers[0].method.replicated_state())
    )

    def go_on(rank: int, meeting: Meeting) -> Any:
        mine = Rank("local", rank, meeting, torch.float32, void=True)
        method = cast(Local, mine.method)
        method.first_local, former = 2, formers[min(rank, 1)]
        source = [one.detach() for one in former.parameters] if rank < 2 else [*at.values()]
        with torch.no_grad():
            for parameter, one in zip(mine.parameters, source, strict=True):
                parameter.copy_(one)
        method.adopt(former.method) if rank < 2 else method.load_replicated_state(alike)
        assert method.unsynced_steps == 2
        step(mine, rank, 5)
        ways = whole([*method.synced_parameters().values()]) - whole(
            [one.detach() for one in mine.parameters]
        )
        method.synchronise()
        method.state()  # a collective: of the same parts on all
        return ways, whole([one.detach() for one in mine.parameters])

    found = world(3, go_on)
    assert all(torch.equal(found[0][1], one[1]) for one in found)
    moved = whole([*at.values()]) - found[0][1]
    way = sum(one[0] for one in found) / 3
    assert float((moved - 0.9 * way).norm() / way.norm()) < 0.7  # its momentum knows another way
    assert float(moved @ way) > 0


def test_the_outer_momentum_suits_the_length() -> None:
    momenta = []
    for steps in (100, 400, 2_000, 20_000):
        method = Local(ReduceContext(None, 0, 2))
        method.set_length(steps)
        momenta.append(round(method.momentum, 2))
    assert momenta == [0.0, 0.5, 0.9, 0.9]


def test_the_mover_computes_alone() -> None:
    """Threads that torch shares work with would keep it waiting while others compute."""
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        mover = _ReduceThread()
        method = SimpleNamespace(all_reduce=lambda _: seen.append(torch.get_num_threads()))
        bucket = SimpleNamespace(flat=torch.zeros(1))
        mover.reduce(cast(Any, method), cast(Any, bucket)).wait()
        mover.close()
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert (seen, torch.get_num_threads()) == ([1, 2], 2)
    finally:
        torch.set_num_threads(before)


def test_codes_are_packed_without_loss() -> None:
    values = torch.randn(64 * 256, generator=torch.Generator().manual_seed(1)) ** 3
    code = codecs.INT4
    message = torch.arange(code.message_bytes(len(values)) + 40).to(
        torch.uint8
    )  # and something behind it
    code.encode(values, message[: code.message_bytes(len(values))], keep_error=False)
    uneven = code.compressible_bytes(len(values))
    for bytes_ in (uneven, 0):
        made = pack(message, bytes_)
        room = torch.cat([made, torch.zeros(uneven, dtype=torch.uint8)])  # larger than needed
        found = torch.empty_like(message)
        unpack(room, uneven, found)
        assert found.equal(message)
        assert (len(made) < 0.8 * len(message)) == bool(bytes_)


def test_what_packing_would_make_longer_goes_as_it_is() -> None:
    message = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    made, found = pack(message, 4000), torch.empty_like(message)
    assert len(made) == len(message) + 8
    unpack(made, 4000, found)
    assert found.equal(message)


@pytest.mark.parametrize("wrong", [b"\xff" * 64, zlib.compress(bytes(100))[2:-4]])
def test_a_parcel_that_is_none_is_an_error(wrong: bytes) -> None:
    made = torch.zeros(200, dtype=torch.uint8)
    made[:8].view(torch.int64)[0] = len(wrong)
    made[8 : 8 + len(wrong)] = torch.frombuffer(bytearray(wrong), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="a rank's message"):
        unpack(made, 96, torch.empty(120, dtype=torch.uint8))
