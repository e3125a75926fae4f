"""Tests encoding in fewer bits, and the reducers that use it; each rank is a thread."""

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
WORST = {"fp16": 2**-11, "bf16": 2**-8, "int8": 1 / 254, "int4": 1 / 14}  # of the largest


def encode_and_decode(code: Codec, values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the decoded values and the rounding errors."""
    message = torch.zeros(code.message_bytes(len(values)), dtype=torch.uint8)
    residual, out = values.clone(), torch.empty_like(values)
    code.encode(residual, message, keep_error=True)
    code.decode(message, out)
    return out, residual


@pytest.mark.parametrize("name", CODES)
def test_codec_error_is_bounded_and_kept_as_residual(name: str) -> None:
    torch.manual_seed(0)
    values = torch.randn(300 * BLOCK) * torch.logspace(-20, 10, 300).repeat_interleave(BLOCK)
    out, residual = encode_and_decode(CODES[name], values)
    largest = values.view(-1, BLOCK).abs().amax(1, keepdim=True)
    assert bool(((out - values).view(-1, BLOCK).abs() <= largest * WORST[name] * 1.001).all())
    assert bool(((out + residual - values).view(-1, BLOCK).abs() <= largest * 1e-6).all())


@pytest.mark.parametrize("name", CODES)
def test_codec_handles_zeros_extremes_and_non_finite(name: str) -> None:
    values = torch.zeros(5 * BLOCK)
    values[BLOCK] = 1e-38
    values[2 * BLOCK : 3 * BLOCK] = 3e38
    values[3 * BLOCK + 7], values[4 * BLOCK + 9] = math.inf, math.nan
    out, residual = encode_and_decode(CODES[name], values)
    blocks = out.view(-1, BLOCK)
    assert not blocks[:2].abs().gt(1e-37).any()
    assert torch.allclose(blocks[2], values[2 * BLOCK : 3 * BLOCK], rtol=0.01)
    assert not blocks[3:].isfinite().all(1).any()
    assert residual.isfinite().all()


def test_codec_compression_ratios() -> None:
    sizes = {name: code.message_bytes(1024 * BLOCK) for name, code in CODES.items()}
    full = 4 * 1024 * BLOCK
    ratios = {name: round(full / size, 2) for name, size in sizes.items()}
    assert ratios == {"fp16": 1.98, "bf16": 2.0, "int8": 3.94, "int4": 7.76}


class Meeting:
    """Collective operations of threads: all contribute, then all read."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self._left = ranks, {}
        self._barrier = threading.Barrier(ranks)

    def __call__(self, rank: int, value: Any) -> list[Any]:
        self._left[rank] = value
        self._barrier.wait(20)
        gathered = [self._left[one] for one in range(self.ranks)]
        self._barrier.wait(20)
        return gathered


class ThreadCollectives(Collectives):
    """Collective operations between threads."""

    def __init__(self, context: ReduceContext, meeting: Meeting) -> None:
        super().__init__(context)
        self._meet = lambda value: meeting(context.rank, value)

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self._meet(tensor.clone())).sum(0))

    ring_all_reduce = all_reduce

    def all_to_all(self, messages: Tensor, codes: int = 0) -> Tensor:
        gathered = self._meet([pack(one, codes) for one in messages])
        return self._unpacked([rows[self.rank] for rows in gathered], codes, messages[0])

    def all_gather(self, message: Tensor, codes: int = 0) -> Tensor:
        return self._unpacked(self._meet(pack(message, codes)), codes, message)

    def _unpacked(self, received: list[Tensor], codes: int, template: Tensor) -> Tensor:
        outputs = torch.stack([torch.empty_like(template) for _ in received])
        for one, row in zip(received, outputs, strict=True):
            unpack(one, codes, row)
        return outputs

    def gather(self, message: Tensor) -> Tensor | None:
        gathered = self._meet(message.clone())
        return torch.stack(gathered) if self.rank == 0 else None


SHAPES = [(60, 70), (60,), (2, 3, 40, 30), (7,), (5000,), (3, 3)]


class Rank:
    """The reducer and parameters of one rank."""

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
        self.method = REDUCERS[name](context, ThreadCollectives(context, meeting))
        self.meeting = meeting

    def average(self, gradients: list[Tensor], layout: list[list[int]]) -> list[Tensor]:
        """Returns the means of one step, with these parameters in each bucket."""
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


def random_gradients(rank: int, step: int, dtype: torch.dtype) -> list[Tensor]:
    source = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randn(shape, generator=source).to(dtype) * 1e-3 for shape in SHAPES]


def run_ranks(ranks: int, body: Callable[[int, Meeting], Any]) -> list[Any]:
    """Runs a function in a thread for each rank, and returns the results."""
    meeting = Meeting(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        return [one.result(30) for one in [pool.submit(body, r, meeting) for r in range(ranks)]]


def steps(
    name: str, ranks: int, count: int, dtype: torch.dtype = torch.float32, **options: Any
) -> list[Any]:
    """Returns the means of each step on each rank, and the final state."""
    begin, state, layout = options.get("begin", 0), options.get("state"), options.get("layout", TWO)
    gradients = options.get("gradients", random_gradients)

    def body(rank: int, meeting: Meeting) -> Any:
        worker = Rank(name, rank, meeting, dtype)
        if state is not None:
            worker.method.load_state(state)
        means = [
            worker.average(gradients(rank, step, dtype), layout)
            for step in range(begin, begin + count)
        ]
        return means, worker.method.state()

    return run_ranks(ranks, body)


def equal(some: list[list[Tensor]], others: list[list[Tensor]]) -> bool:
    pairs = [pair for both in zip(some, others, strict=True) for pair in zip(*both, strict=True)]
    return all(torch.equal(one, other) for one, other in pairs)


def exact_mean(ranks: int, step: int) -> Tensor:
    gathered = [random_gradients(rank, step, torch.float64) for rank in range(ranks)]
    return torch.stack([concatenate(one) for one in gathered]).mean(0)


def concatenate(tensors: list[Tensor]) -> Tensor:
    return torch.cat([one.double().reshape(-1) for one in tensors])


@each_case("ranks", [1, 2, 3, 4])
@each_case("name", REDUCERS)
def test_ranks_get_equal_means_that_sum_to_gradients(name: str, ranks: int) -> None:
    """The sum of the means approaches that of the gradients: rounding errors are added later."""
    outputs = steps(name, ranks, 12)
    assert all(equal(outputs[0][0], one[0]) for one in outputs)
    total = sum(concatenate(means) for means in outputs[0][0])
    expected = sum(exact_mean(ranks, step) for step in range(12))
    limit = {"exact": 1e-6, "fp16": 1e-3, "bf16": 1e-3, "int8": 3e-3, "int4": 0.06}
    if name in limit:
        assert float((total - expected).abs().max() / expected.abs().max()) < limit[name]


@pytest.mark.parametrize("name", REDUCERS)
def test_resume_is_bitwise_exact(name: str) -> None:
    uninterrupted = steps(name, 3, 8)
    first = steps(name, 3, 5)
    resaved = steps(name, 3, 0, state=first[0][1])  # saved again before any step
    continued = steps(name, 3, 3, begin=5, state=resaved[0][1])
    assert equal(uninterrupted[0][0][5:], continued[0][0])


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_residuals_survive_resume_with_other_world_size(name: str, ranks: int) -> None:
    """The residuals of 3 ranks become part of the next mean."""
    residuals = steps(name, 3, 6)[0][1]

    def zero_gradients(rank: int, step: int, dtype: torch.dtype) -> list[Tensor]:
        return [torch.zeros(shape, dtype=dtype) for shape in SHAPES]

    continued_steps = steps(name, ranks, 4, state=residuals, gradients=zero_gradients)
    said = sum(concatenate(means) for means in continued_steps[0][0])
    residual = torch.cat(
        [residuals[f"layer{n}"].double().mean(0).reshape(-1) for n in range(len(SHAPES))]
    )
    assert float((said - residual).abs().max()) < 0.02 * float(residual.abs().max())
    assert float(residual.abs().max()) > 0


@pytest.mark.parametrize(("before", "ranks"), [(3, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_residuals_survive_regroup(name: str, before: int, ranks: int) -> None:
    """A newcomer starts without residuals."""

    def train(rank: int, meeting: Meeting) -> Rank:
        worker = Rank(name, rank, meeting, torch.float64, void=True)
        for step in range(4):
            worker.average(random_gradients(rank, step, torch.float64), TWO)
            worker.method.commit()
        return worker

    previous_ranks = run_ranks(before, train)
    expected_residual = sum(flat_residual(one) for one in previous_ranks[:ranks]) / before

    def resume_training(rank: int, meeting: Meeting) -> Any:
        worker = Rank(name, rank, meeting, torch.float64, void=True)
        if rank < before:
            worker.method.adopt(previous_ranks[rank].method)
        else:
            worker.method.load_replicated_state(previous_ranks[0].method.replicated_state())
        residuals = flat_residual(worker)
        means = worker.average([torch.zeros(one, dtype=torch.float64) for one in SHAPES], TWO)
        worker.method.commit()
        return residuals, means, flat_residual(worker)

    outputs = run_ranks(ranks, resume_training)
    assert (
        float((sum(one[0] for one in outputs) / ranks - expected_residual).abs().max())
        < 3e-3 * expected_residual.abs().max()
    )
    assert equal([outputs[0][1]], [outputs[-1][1]])
    remaining_residual = sum(one[2] for one in outputs) / ranks
    assert (
        float((concatenate(outputs[0][1]) + remaining_residual - expected_residual).abs().max())
        < 6e-3 * expected_residual.abs().max()
    )
    assert ranks > 1 or not remaining_residual.any()


def flat_residual(rank: Rank) -> Tensor:
    """Returns the residuals of a rank, concatenated."""
    feedback = rank.method._feedback
    outputs = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for number, one in enumerate(outputs):
        if f"layer{number}" in feedback._views:
            one += feedback._views[f"layer{number}"].committed
    return concatenate(outputs)


@pytest.mark.parametrize("name", REDUCERS)
def test_rollback_leaves_no_trace(name: str) -> None:
    """The aborted step ends after its first bucket; its gradients come again in other shares."""

    def body(rank: int, meeting: Meeting, *, void: bool) -> list[list[Tensor]]:
        worker = Rank(name, rank, meeting, torch.float32, void=True)
        means = []
        for step in range(5):
            if void and step == 3:
                worker.average(random_gradients(rank, 100, torch.float32), TWO[:1])
                worker.method.rollback()
            means.append(worker.average(random_gradients(rank, step, torch.float32), TWO))
            worker.method.commit()
        return means

    rolled_back, baseline = (run_ranks(3, partial(body, void=void)) for void in (True, False))
    assert equal(rolled_back[0], baseline[0])


def test_outer_state_survives_other_world_size() -> None:
    """All ranks have the same momentum; residuals keep their mean."""

    def train_locally(rank: int, meeting: Meeting) -> Any:
        worker = Rank("local", rank, meeting, torch.float32)
        method = worker.method
        assert isinstance(method, Local)
        method.local_steps, _ = 2, method.set_length(400)
        method.first_local = 2
        for step in range(6):
            worker.average(random_gradients(rank, step, torch.float32), TWO)
            with torch.no_grad():
                for parameter, delta in zip(
                    worker.parameters, random_gradients(rank, 10 + step, torch.float32), strict=True
                ):
                    parameter -= delta
            if method.is_due:
                method.synchronise()
        return method.state()

    state = run_ranks(3, train_locally)[0]

    def resumed(rank: int, meeting: Meeting) -> Any:
        worker = Rank("local", rank, meeting, torch.float32)
        worker.method.load_state(state)
        return worker.method.state(), worker.method._changes._feedback._views

    outputs = run_ranks(2, resumed)
    for loaded_state, loaded_residuals in outputs:
        assert loaded_state["steps"] == state["steps"] == 6
        for name, momentum in state["momentum"].items():
            assert momentum.any()
            assert torch.equal(loaded_state["momentum"][name], momentum)
        for name, rows in state["ways"].items():
            assert torch.allclose(
                loaded_residuals[name].committed.float(), rows.float().mean(0), rtol=0.01, atol=1e-7
            )


@pytest.mark.parametrize("name", REDUCERS)
def test_residuals_survive_bucket_changes(name: str) -> None:
    def body(rank: int, meeting: Meeting) -> Any:
        worker = Rank(name, rank, meeting, torch.float32)
        layouts = [TWO, ONE, [[5, 4], [3, 2], [1, 0]], ONE]
        return [
            worker.average(random_gradients(rank, n, torch.float32), one)
            for n, one in enumerate(layouts)
        ]

    outputs = run_ranks(3, body)
    assert equal(outputs[0], outputs[1])
    total = sum(concatenate(means) for means in outputs[0])
    expected = sum(exact_mean(3, step) for step in range(4))
    if name in ("exact", "bf16", "int8"):
        assert float((total - expected).abs().max() / expected.abs().max()) < 0.01


@pytest.mark.parametrize(("name", "has_feedback"), [("int4", True), ("fp16", False)])
def test_only_methods_with_error_feedback_adopt_residuals(name: str, has_feedback: bool) -> None:
    def body(rank: int, meeting: Meeting) -> Any:
        before, worker = (Rank(one, rank, meeting, torch.float32) for one in ("int8", name))
        before.average(random_gradients(rank, 0, torch.float32), TWO)
        worker.method.adopt(before.method)
        return worker.method.state()

    assert [bool(state) for state in run_ranks(2, body)] == [
        has_feedback,
        False,
    ]  # rank 0 has those of all


@each_case(("where", "what"), [(0, math.inf), (1, -math.inf), (4, math.nan)])
@each_case("name", REDUCERS)
def test_non_finite_values_reach_ranks_and_leave_no_residual(
    name: str, where: int, what: float
) -> None:
    def spoiled(rank: int, step: int, dtype: torch.dtype) -> list[Tensor]:
        outputs = random_gradients(rank, step, dtype)
        if step == 2 and rank == 1:
            outputs[where].view(-1)[5] = what
        return outputs

    for means, _ in steps(name, 3, 5, gradients=spoiled):
        finite = [all(bool(one.isfinite().all()) for one in step) for step in means]
        assert finite == [True, True, False, True, True]


@each_case("dtype", [torch.float64, torch.bfloat16, torch.float16])
@each_case("name", REDUCERS)
def test_parameters_of_other_dtypes(name: str, dtype: torch.dtype) -> None:
    outputs = steps(name, 3, 3, dtype)
    assert all(equal(outputs[0][0], one[0]) for one in outputs)
    mean = torch.cat([one.reshape(-1) for one in outputs[0][0][0]])
    assert mean.dtype == dtype
    expected = exact_mean(3, 0)
    assert float((mean.double() - expected).abs().max() / expected.abs().max()) < 0.2


@pytest.mark.parametrize("name", REDUCERS)
def test_zero_gradients_stay_zero(name: str) -> None:
    def zero_gradients(rank: int, step: int, dtype: torch.dtype) -> list[Tensor]:
        return [torch.zeros(shape, dtype=dtype) for shape in SHAPES]

    for means, _ in steps(name, 2, 3, gradients=zero_gradients):
        assert not any(bool(one.any()) for step in means for one in step)


@pytest.mark.parametrize("name", REDUCERS)
def test_small_parameters_and_buckets_are_exact(name: str) -> None:
    outputs = steps(name, 3, 1, layout=[[5], [4, 3, 2, 1, 0]])[0][0][0]
    for number in (1, 3, 5):
        expected = torch.stack(
            [random_gradients(rank, 0, torch.float32)[number] for rank in range(3)]
        ).mean(0)
        assert torch.allclose(outputs[number], expected, rtol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_means_and_residuals_sum_to_gradients(name: str, ranks: int) -> None:
    """The means and the residuals add up to the gradients."""
    outputs = steps(name, ranks, 6)
    state = outputs[0][1]
    residuals = torch.cat(
        [state[f"layer{n}"].double().mean(0).reshape(-1) for n in range(len(SHAPES))]
    )
    total = sum(concatenate(means) for means in outputs[0][0])
    expected = sum(exact_mean(ranks, step) for step in range(6))
    assert float((total + residuals - expected).abs().max() / expected.abs().max()) < 2e-3


@pytest.mark.parametrize("void", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_residual_of_unused_parameter_is_kept(name: str, ranks: int, void: bool) -> None:
    """DDP gives such a parameter no mean: its updates and residual add up to its gradients."""

    def gradients(rank: int, step: int) -> list[Tensor]:
        """One parameter is used in turn by all ranks, by the last rank, and by none."""
        outputs = random_gradients(rank, step, torch.float64)
        if step % 3 == 2 or (step % 3 == 1 and rank < ranks - 1):
            outputs[0].zero_()
        return outputs

    def body(rank: int, meeting: Meeting) -> Any:
        worker = Rank(name, rank, meeting, torch.float64, void=void, unused=True)
        total = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        for step in range(6):
            for number, mean in enumerate(worker.average(gradients(rank, step), TWO)):
                if number or step % 3 < 2:
                    total[number] += mean
                else:
                    assert not mean.any()
            worker.method.commit()
        return concatenate(total), flat_residual(worker)

    outputs = run_ranks(ranks, body)
    expected = (
        sum(concatenate(gradients(rank, step)) for rank in range(ranks) for step in range(6))
        / ranks
    )
    residuals = sum(one[1] for one in outputs) / ranks
    assert all(torch.equal(one[0], outputs[0][0]) for one in outputs)
    assert float((outputs[0][0] + residuals - expected).abs().max() / expected.abs().max()) < 2e-3
    assert bool(residuals[: math.prod(SHAPES[0])].any()) == (ranks > 1)


def test_bytes_sent_depends_on_element_size() -> None:
    wide_context = ReduceContext(None, 0, 2, element_bytes=8.0)
    sent = {name: made(wide_context).bytes_sent(1000, 2) for name, made in REDUCERS.items()}
    assert sent["exact"] == 8000
    float32_bytes = REDUCERS["int8"](ReduceContext(None, 0, 2)).bytes_sent(1000, 2)
    assert sent["int8"] == float32_bytes  # the size of codes does not depend on the input


def test_local_steps_synchronise_to_mean() -> None:
    """They continue from the mean of their parameters, moved a little further by momentum."""

    def body(rank: int, meeting: Meeting) -> Any:
        worker = Rank("local", rank, meeting, torch.float32)
        method = worker.method
        assert isinstance(method, Local)
        method.local_steps = 3
        said = method.set_length(20)
        positions, buffer = [], torch.full((3,), float(rank))
        for step in range(12):
            gradients = worker.average(random_gradients(rank, step, torch.float32), TWO)
            with torch.no_grad():
                for parameter, gradient in zip(worker.parameters, gradients, strict=True):
                    parameter -= gradient
            if method.is_due or step == 11:
                method.synchronise([buffer])
            positions.append(concatenate([one.detach() for one in worker.parameters]))
        return positions, said, buffer

    (first, said, buffer), *others = run_ranks(3, body)
    alike = [all(torch.equal(first[step], one[0][step]) for one in others) for step in range(12)]
    assert alike == [step in (0, 1, 4, 7, 10, 11) for step in range(12)]
    assert "costs loss" in said
    assert torch.allclose(buffer, torch.ones(3))
    delta = sum(exact_mean(3, step) for step in (2, 3, 4))
    moved = first[1] - first[4]
    assert float((moved - 0.9 * delta).norm() / delta.norm()) < 0.02  # the first momentum is 0


def test_newcomer_to_local_steps_starts_from_last_sync() -> None:
    """The others keep their models and residuals; the next mean covers all ranks."""

    def step(worker: Rank, rank: int, number: int) -> None:
        gradients = worker.average(random_gradients(rank, number, torch.float32), TWO)
        with torch.no_grad():
            for parameter, gradient in zip(worker.parameters, gradients, strict=True):
                parameter -= gradient
        worker.method.commit()

    def before(rank: int, meeting: Meeting) -> Rank:
        worker = Rank("local", rank, meeting, torch.float32, void=True)
        cast(Local, worker.method).first_local = 2
        for number in range(5):
            step(worker, rank, number)
            if number == 2:
                cast(Local, worker.method).synchronise()
        return worker

    previous_ranks = run_ranks(2, before)
    synced, alike = deepcopy(
        (
            cast(Local, previous_ranks[0].method).synced_parameters(),
            previous_ranks[0].method.replicated_state(),
        )
    )

    def resume_training(rank: int, meeting: Meeting) -> Any:
        worker = Rank("local", rank, meeting, torch.float32, void=True)
        method = cast(Local, worker.method)
        method.first_local, previous_rank = 2, previous_ranks[min(rank, 1)]
        source = (
            [one.detach() for one in previous_rank.parameters] if rank < 2 else [*synced.values()]
        )
        with torch.no_grad():
            for parameter, one in zip(worker.parameters, source, strict=True):
                parameter.copy_(one)
        method.adopt(previous_rank.method) if rank < 2 else method.load_replicated_state(alike)
        assert method.unsynced_steps == 2
        step(worker, rank, 5)
        deltas = concatenate([*method.synced_parameters().values()]) - concatenate(
            [one.detach() for one in worker.parameters]
        )
        method.synchronise()
        method.state()  # a collective operation: all have the same parts
        return deltas, concatenate([one.detach() for one in worker.parameters])

    outputs = run_ranks(3, resume_training)
    assert all(torch.equal(outputs[0][1], one[1]) for one in outputs)
    moved = concatenate([*synced.values()]) - outputs[0][1]
    delta = sum(one[0] for one in outputs) / 3
    assert float((moved - 0.9 * delta).norm() / delta.norm()) < 0.7  # the momentum differs
    assert float(moved @ delta) > 0


def test_outer_momentum_depends_on_length() -> None:
    momenta = []
    for steps in (100, 400, 2_000, 20_000):
        method = Local(ReduceContext(None, 0, 2))
        method.set_length(steps)
        momenta.append(round(method.momentum, 2))
    assert momenta == [0.0, 0.5, 0.9, 0.9]


def test_reduce_thread_uses_single_torch_thread() -> None:
    """With torch's shared threads, it would wait while others compute."""
    before, thread_counts = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        reduce_thread = _ReduceThread()
        method = SimpleNamespace(all_reduce=lambda _: thread_counts.append(torch.get_num_threads()))
        bucket = SimpleNamespace(flat=torch.zeros(1))
        reduce_thread.reduce(cast(Any, method), cast(Any, bucket)).wait()
        reduce_thread.close()
        other = threading.Thread(target=lambda: thread_counts.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert (thread_counts, torch.get_num_threads()) == ([1, 2], 2)
    finally:
        torch.set_num_threads(before)


def test_pack_is_lossless_and_compresses() -> None:
    values = torch.randn(64 * 256, generator=torch.Generator().manual_seed(1)) ** 3
    code = codecs.INT4
    message = torch.arange(code.message_bytes(len(values)) + 40).to(
        torch.uint8
    )  # with extra bytes at the end
    code.encode(values, message[: code.message_bytes(len(values))], keep_error=False)
    compressible = code.compressible_bytes(len(values))
    for bytes_ in (compressible, 0):
        made = pack(message, bytes_)
        padded = torch.cat(
            [made, torch.zeros(compressible, dtype=torch.uint8)]
        )  # larger than necessary
        outputs = torch.empty_like(message)
        unpack(padded, compressible, outputs)
        assert outputs.equal(message)
        assert (len(made) < 0.8 * len(message)) == bool(bytes_)


def test_incompressible_message_is_sent_unpacked() -> None:
    message = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    made, outputs = pack(message, 4000), torch.empty_like(message)
    assert len(made) == len(message) + 8
    unpack(made, 4000, outputs)
    assert outputs.equal(message)


@pytest.mark.parametrize("payload", [b"\xff" * 64, zlib.compress(bytes(100))[2:-4]])
def test_unpack_rejects_corrupt_message(payload: bytes) -> None:
    made = torch.zeros(200, dtype=torch.uint8)
    made[:8].view(torch.int64)[0] = len(payload)
    made[8 : 8 + len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="a rank's message"):
        unpack(made, 96, torch.empty(120, dtype=torch.uint8))
