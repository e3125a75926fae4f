"""Tests the errors and messages of a session that a script uses in an unintended way."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and it sets a variable
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore
from torch.utils.data import TensorDataset

from paceline import train
from paceline.spec.errors import SettingError
from paceline.spec.training.communication import validate
from paceline.train.comms import Comms
from paceline.train.elastic import waits
from paceline.train.elastic.connections import GlooConnections
from paceline.train.elastic.job_group import JobGroup
from paceline.train.elastic.newcomer import Recording
from paceline.train.elastic.recovery import ExchangeResult, Recovery
from paceline.train.models import UNNAMED


@pytest.fixture
def session(tmp_path: Path) -> Iterator[train.Session]:
    with train.join(run_dir=tmp_path, seed=0) as session:
        yield session


def prepare_training(session: train.Session) -> train.Loader:
    network = session.place(nn.Linear(2, 1))
    session.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
    return session.loader(TensorDataset(torch.zeros(8, 2)), 4)


def test_loader_requires_session_epochs(session: train.Session) -> None:
    with pytest.raises(RuntimeError, match=r"session\.epochs"):
        list(prepare_training(session))


def train_on_batches(session: train.Session, batches: Iterable[train.Batch]) -> None:
    for (inputs,) in batches:
        session.step(session.models.first.model(inputs).square().mean(1))


@pytest.mark.parametrize(
    ("every", "taken", "message"),
    [
        (0, [1], "the batch loop of epoch 1 was left after 1 of 4 steps"),
        (0, [4, 3], "the batch loop of epoch 2 was left after 3 of 4 steps"),
        (3, [3, 1, 1], "the batch loop of epoch 2 was left after 1 of 4 steps"),
        (0, [0], "an iteration of session.epochs ended without a step"),
        (3, [3, 0], "an iteration of session.epochs ended without a step"),
    ],
)
def test_epochs_refuses_unfinished_batch_loop(
    session: train.Session, every: int, taken: list[int], message: str
) -> None:
    prepare_training(session)
    loader, limits = session.loader(TensorDataset(torch.zeros(15, 2)), 4), iter(taken)

    def training() -> None:
        for _ in session.epochs(loader, 3, every=every):
            train_on_batches(session, islice(loader, next(limits)))

    with pytest.raises(SettingError) as error:
        training()
    assert error.value.message == message
    assert session.progress.step == sum(taken)
    assert "every=STEPS" in error.value.remedy


def test_epochs_accepts_batch_loops_left_at_their_end(session: train.Session) -> None:
    """The batch loop may end by a count of its own at a pause or the end of the epoch."""
    loader = prepare_training(session)
    for _ in session.epochs(loader, 3, every=1):
        train_on_batches(session, islice(loader, 1))
    assert session.progress.step == 6


def test_batch_that_was_given_in_vain_does_not_leave_the_loop_early(session: train.Session) -> None:
    """When a rank is lost, its batch is given again: a script's own count is one too high."""
    loader, num_lost = prepare_training(session), 0
    for _ in session.epochs(loader, 2):
        for batch in islice(loader, len(loader)):
            if not num_lost:
                num_lost += 1
                loader.void()
                continue
            train_on_batches(session, [batch])
    assert session.progress.step == 2 * len(loader)


def test_leaving_both_loops_ends_training(session: train.Session) -> None:
    loader = prepare_training(session)
    for _ in session.epochs(loader, 3):
        train_on_batches(session, islice(loader, 1))
        break
    session.save_model({})
    assert session.progress.step == 1


def test_stop_ends_training_in_mid_epoch(session: train.Session) -> None:
    loader, iterations = prepare_training(session), 0
    for _ in session.epochs(loader, 3):
        iterations += 1
        for batch in loader:
            train_on_batches(session, [batch])
            session.stop("enough")
            break
    assert (session.progress.step, iterations) == (1, 1)


def test_stop_before_first_epoch_trains_nothing(session: train.Session) -> None:
    loader = prepare_training(session)
    session.progress.step = 3
    session.stop("enough")
    assert not [*session.epochs(loader, 3)]
    assert session.progress.step == 3


@pytest.mark.parametrize(
    ("samples", "batch", "found"),
    [
        (8, 2, "their global batches have 2 and 4 samples"),
        (7, 4, "its data have 7 samples, fewer than the 8 of that loader"),
    ],
)
def test_loader_that_differs_from_that_of_training_is_refused(
    session: train.Session, samples: int, batch: int, found: str
) -> None:
    loader = prepare_training(session)
    other = session.loader(TensorDataset(torch.zeros(samples, 2)), batch)
    epochs = session.epochs(loader, 2)
    next(epochs)
    for both in (zip(loader, other, strict=False), zip(other, loader, strict=False)):
        with pytest.raises(SettingError, match="another loader than the one given to") as error:
            next(both)
        assert error.value.found == found
    assert "session.shard(data)" in error.value.remedy


@pytest.mark.parametrize("epochs", [1, 2])
def test_second_loader_is_refused_after_last_batch(session: train.Session, epochs: int) -> None:
    loader = prepare_training(session)
    other = session.loader(TensorDataset(torch.zeros(9, 2)), 4)
    outer = session.epochs(loader, epochs)
    next(outer)
    train_on_batches(session, loader)
    with pytest.raises(SettingError, match="no batch left"):
        next(iter(other))


def test_second_loader_is_refused_after_training(session: train.Session) -> None:
    loader = prepare_training(session)
    other = session.loader(TensorDataset(torch.zeros(9, 2)), 4)
    for _ in session.epochs(loader, 2):
        train_on_batches(session, loader)
    for _ in range(2):
        with pytest.raises(SettingError, match="no batch left"):
            list(other)
        assert not [*session.epochs(loader, 1)]  # nothing is left to train


def test_second_loop_over_training_loader_warns(
    session: train.Session, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = prepare_training(session)
    for _ in session.epochs(loader, 2):
        train_on_batches(session, islice(loader, 1))
        train_on_batches(session, loader)
    assert "gave no batch" not in capsys.readouterr().out
    assert not [*loader]
    assert "warning: a loop over the training loader gave no batch" in capsys.readouterr().out


def test_second_loader_may_come_first_after_resume(tmp_path: Path) -> None:
    """A checkpoint of the last step of an epoch is resumed before the evaluation."""
    seen: list[int] = []

    def training(fails_at: int = 0) -> None:
        with train.join(run_dir=tmp_path, seed=0) as session:
            loader = prepare_training(session)
            other = session.loader(TensorDataset(torch.zeros(9, 2)), 4)
            session.checkpoints(every=1)
            for _ in session.epochs(loader, 2):
                for _, batch in zip(other, loader, strict=False):
                    train_on_batches(session, [batch])
                if session.progress.step == fails_at:
                    raise ValueError("in the evaluation")
                seen.append(session.progress.step)

    with pytest.raises(ValueError, match="evaluation"):
        training(fails_at=2)
    training()
    assert seen == [2, 4]


def test_prints_epochs_from_1_and_records_them_from_0(
    session: train.Session, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line per epoch with metrics of training and evaluation; counted from 0 like the loop."""
    loader, model = prepare_training(session), session.models.first.model
    for epoch in session.epochs(loader, 3):
        for (inputs,) in loader:
            session.step(model(inputs).square().mean(1))
        if epoch == 1:
            session.log("val", accuracy=0.123456789)
    session.log("test", accuracy=1.0)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    epoch_summaries = [line for line in lines if "lr" not in line]
    assert [line.split("  ")[:2] for line in epoch_summaries] == [
        [f"epoch {epoch}", f"step {2 * epoch}/6"] for epoch in (1, 2, 3, 3)
    ]
    assert "train: loss" in epoch_summaries[1]
    assert epoch_summaries[1].endswith("val: accuracy 0.1235")
    assert epoch_summaries[3].endswith("/6  test: accuracy 1")
    records = (session.folder / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["epoch"] for line in records} == {0, 1, 2}


def test_reports_finished_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for epochs in (4, 2):
        with train.join(run_dir=tmp_path) as session:
            loader, model = prepare_training(session), session.models.first.model
            session.checkpoints()
            for _ in session.epochs(loader, epochs):
                for (inputs,) in loader:
                    session.step(model(inputs).square().mean(1))
    said = capsys.readouterr().out
    assert "nothing is left to train: step 8, in epoch 4, is done already" in said
    assert "and 4 steps (2 epochs) were asked for" in said


def test_length_grouped_epoch_survives_batch_size_changes(
    tmp_path: Path,
) -> None:
    seen: list[float] = []
    for batch, steps in ((4, 1), (3, 3), (5, 0)):  # each ends in mid-epoch
        with train.join(run_dir=tmp_path, seed=0) as session:
            network = session.place(nn.Linear(1, 1))
            model = session.prepare(network, torch.optim.SGD(network.parameters(), lr=0.0))
            data = TensorDataset(torch.arange(30.0)[:, None])
            loader = session.loader(data, batch, lengths=[number % 7 for number in range(30)])
            session.checkpoints()
            for _ in session.epochs(loader, 1, steps):
                for (inputs,) in loader:
                    seen += inputs[:, 0].tolist()
                    session.step(model(inputs).mean(1))
    assert sorted(seen) == list(range(30))


@pytest.mark.parametrize(
    ("samples", "batch", "changed"),
    [
        (8, 2, "a global batch of 2 instead of 4: 8 steps left"),
        (8, 8, "a global batch of 8 instead of 4: 2 steps left"),
        (18, 4, "18 training samples instead of 8: 10 steps left"),
        (
            4,
            2,
            "a global batch of 2 instead of 4 and 4 training samples instead of 8: 4 steps left",
        ),
        (8, 4, ""),
    ],
)
def test_resume_trains_remaining_epochs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], samples: int, batch: int, changed: str
) -> None:
    trained: list[int] = []
    rates: dict[int, float] = {}
    for epochs, sizes in ((2, (8, 4)), (4, (samples, batch)), (1, (samples, 3))):
        with train.join(run_dir=tmp_path, seed=0) as session:
            network = session.place(nn.Linear(2, 1))
            optimizer = torch.optim.SGD(network.parameters(), lr=0.25 * epochs)
            model = session.prepare(network, optimizer)
            loader = session.loader(TensorDataset(torch.zeros(sizes[0], 2)), sizes[1])
            session.checkpoints()
            for epoch in session.epochs(loader, epochs):
                rates[epoch] = optimizer.param_groups[0]["lr"]
                for (inputs,) in loader:
                    trained.append(epoch)
                    session.step(model(inputs).square().mean(1))
    steps = -(-samples // batch)
    assert trained == [0, 0, 1, 1, *[2] * steps, *[3] * steps]
    assert rates == {0: 0.5, 1: 0.5, 2: 1, 3: 1}
    said = capsys.readouterr().out
    assert "learning rate 0.5 of the checkpoint → 1\n" in said
    assert said.count("continuing") == bool(changed)  # not if nothing remains
    assert not changed or f"continuing with {changed}\n" in said
    assert "(1 epoch) were asked for" in said


def test_stale_group_exchanges_nothing(
    session: train.Session,
) -> None:
    """Covers a rank that has received only the first of several updates from another rank."""
    loader = prepare_training(session)
    for _ in session.epochs(loader, 1):
        for batch in loader:
            session._membership.recovery = Mock(is_batch_void=False, stale=True)
            losses = {UNNAMED: torch.ones(len(batch.ids), requires_grad=True)}
            assert session._loop.steps.backward(batch, losses) is ExchangeResult.VOID
            session._membership.recovery.finish.assert_not_called()
            session._membership.recovery = None
            break
        break


def test_repeated_batch_keeps_loss_of_first_update(session: train.Session) -> None:
    """A rank is lost before the end of the step, and its batch is divided and given again."""
    network = session.place(nn.Linear(2, 1))
    for name in ("one", "two"):
        session.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1), name=name)
    loader = session.loader(TensorDataset(torch.zeros(8, 2)), 4)
    told = session._journal.record = Mock()  # type: ignore[method-assign]
    passes = 0
    for _ in session.epochs(loader, 1):
        for _ in loader:
            passes += 1
            sample_losses = torch.full((4,), float(passes), requires_grad=True)
            session.update("two", sample_losses, found=torch.full((4,), 2.0 * passes))
            if passes == 1:
                exchange, session._loop.steps.backward = (
                    session._loop.steps.backward,
                    Mock(return_value=ExchangeResult.VOID),
                )  # type: ignore[method-assign]
            has_stepped = session.step({"one": sample_losses})
            if passes == 1:
                session._loop.steps.backward = exchange  # type: ignore[method-assign]
            assert has_stepped == (passes > 1)
    split, values = told.call_args_list[0].args
    assert (split, passes) == ("train", 3)
    assert (values["samples"], values["one_loss"], values["two_loss"]) == (8, 2.5, 2.0)
    assert (values["found"], session.progress.updated) == (4.0, 0)


def test_resume_repeats_lost_records(tmp_path: Path) -> None:
    """Holds in the same run directory; a training in another one begins with its own records."""

    def train_on(folder: Path, steps: int, resume: str) -> list[tuple[str, int, int]]:
        with train.join(run_dir=folder, seed=0, log_every=1, quiet=False) as session:
            loader = prepare_training(session)
            session.checkpoints(every="epoch", resume=resume)
            for epoch in session.epochs(loader, steps=steps):
                for (inputs,) in loader:
                    session.step(session.models.first.model(inputs).square().mean(1))
                session.log("val", epoch=epoch, time=7)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return [(one["split"], one["step"], int(one["time"])) for one in map(json.loads, lines)]

    run_folder, other = tmp_path / "ours", tmp_path / "other"
    told = train_on(run_folder, 4, "auto")
    assert [one[:2] for one in told if one[0] == "val"] == [("val", 2), ("val", 4)]
    recorded_lines = (run_folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_folder / "metrics.jsonl").write_text("".join(recorded_lines[:2]))
    repeated = train_on(run_folder, 6, "auto")[: len(told)]
    assert [one[:2] for one in repeated] == [one[:2] for one in told]
    assert repeated[2] == ("val", 2, 7)
    assert [one[1] for one in train_on(other, 8, str(run_folder))] == [7, 8, 8]


def test_meter_counts_partial_metric_separately(session: train.Session) -> None:
    meter = session.meter()
    meter.add(4, loss=torch.ones(4))
    meter.add_other_samples(two=torch.empty(0))
    meter.add(2, loss=torch.ones(2), two=torch.tensor([3.0, 5.0]))
    outcome = meter.result()
    assert (outcome.count, outcome["two"], outcome["loss"], outcome.counts) == (
        6,
        4.0,
        1.0,
        {"two": 2},
    )


@pytest.mark.parametrize(("scale", "warnings"), [(0.25, 1), (None, 0)])
def test_weighted_sum_warns_once(
    session: train.Session,
    capsys: pytest.CaptureFixture[str],
    scale: float | None,
    warnings: int,
) -> None:
    loader, model = prepare_training(session), session.models.first.model
    for _ in session.epochs(loader, 2):
        for (inputs,) in loader:
            squares = model(inputs).square()
            session.step(squares.mean() if scale is None else (scale * squares).sum())
    assert capsys.readouterr().out.count("looks like a sum over the samples") == warnings


def test_meter_result_can_be_logged(session: train.Session) -> None:
    rows = [torch.tensor([float(one)]) for one in range(8)]
    meter = session.meter()
    for (x,) in session.shard(rows):
        meter.add(len(x), size=x.square()[:, 0])
    session.log("test", **(means := meter.result()))
    assert [*means] == ["size"]
    assert means["size"] == 17.5


def test_checkpoints_require_prepare(session: train.Session) -> None:
    with pytest.raises(RuntimeError, match=r"session\.prepare comes before"):
        session.checkpoints()


def test_shard_can_be_iterated_twice(session: train.Session) -> None:
    shard = session.shard(TensorDataset(torch.arange(5)), size=2)
    assert len(shard) == 3
    for _ in range(2):
        assert torch.cat([values for (values,) in shard]).tolist() == [0, 1, 2, 3, 4]


def test_each_iteration_of_a_shard_compares_data(
    session: train.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that came for a lost one takes part in its first: the others must in all."""
    compare = Mock()
    monkeypatch.setattr(Comms, "agree", compare)
    shard = session.shard(TensorDataset(torch.arange(5)))
    compare.assert_not_called()
    for _ in range(2):
        list(shard)
    assert [call.args[0] for call in compare.call_args_list] == [
        "the data set of session.shard"
    ] * 2


def test_padding_samples_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks share three samples: one rank has a stand-in for one of its batches."""
    monkeypatch.setattr(Comms, "agree", Mock())  # there is no second rank
    num_samples = 0
    for rank in range(2):
        session = train.join(quiet=True)
        single_world, meter = session.world, session.meter()
        session.comms.world = replace(single_world, rank=rank, size=2)
        for (values,) in session.shard(TensorDataset(torch.ones(3)), size=1):
            meter.add(len(values), hits=values)
        session.comms.world = single_world
        assert len(meter.result().sums) == 1
        meter.add(1, hits=torch.ones(1))  # no stand-in outside of the loop
        assert meter.result().count == 1
        session.comms.world = replace(single_world, rank=rank, size=2)
        num_samples += sum(
            batch.count for batch in session.shard(TensorDataset(torch.ones(3)), size=1)
        )
    assert num_samples == 3


def test_meter_rejects_values_of_wrong_shape(session: train.Session) -> None:
    meter = session.meter()
    for invalid in (torch.tensor(1.0), torch.ones(4, 2), torch.ones(3)):
        with pytest.raises(ValueError, match="one number for each of the 4 samples, but loss has"):
            meter.add(4, loss=invalid)


def test_meter_is_not_empty_with_absent_ranks(session: train.Session) -> None:
    meter = session.meter()
    assert meter.empty
    session.progress.some_absent = True
    assert not meter.empty


def test_place_keeps_dtype(session: train.Session) -> None:
    assert session.place(nn.Linear(2, 1).double()).weight.dtype == torch.float64


@pytest.mark.parametrize("shape", [(3,), (4, 2), (8,)])
def test_step_rejects_losses_of_wrong_shape(session: train.Session, shape: tuple[int, ...]) -> None:
    loader = prepare_training(session)
    epochs = session.epochs(loader, 1)
    next(epochs)
    batches = iter(loader)
    next(batches)
    with pytest.raises(ValueError, match="one loss for each of the 4 samples"):
        session.step(torch.zeros(shape, requires_grad=True))
    batches.close()
    epochs.close()


def test_deterministic_mode_is_opt_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with train.join(run_dir=tmp_path):
        assert not torch.backends.cudnn.deterministic
        assert not asked
    with train.join(run_dir=tmp_path, deterministic=True):
        assert asked == [True]


def test_rejects_unknown_communication(session: train.Session) -> None:
    network = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    with pytest.raises(SettingError, match="int9: unknown value") as error:
        session.prepare(network, optimizer, communication="int9")
    assert "int8" in error.value.remedy
    for invalid in ("int8:4", "local:1", "local:x", "powersgd", "powersgd:8"):
        with pytest.raises(SettingError, match=invalid):
            session.prepare(network, optimizer, communication=invalid)


def test_rejects_incompatible_communication(tmp_path: Path) -> None:
    network = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    for asked, name in (("auto", "one"), ("local:5", "one")):
        with (
            train.join(run_dir=tmp_path / name, quiet=True) as session,
            pytest.raises(SettingError, match=f"{asked} cannot be combined with several"),
        ):
            session.prepare(network, optimizer, communication=asked, name=name)
    for option in ("scaled", "sharded", "averaged"):
        with pytest.raises(SettingError, match="local cannot be combined with"):
            validate("local", **{option: True})


# --- what prevents recovery, or joining


@pytest.fixture
def recoverable(session: train.Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[train.Session]:
    """A session whose events are recorded, as under a launcher that supports recovery."""
    monkeypatch.setattr(waits, "enable", Mock())  # would be permanent in this process
    control = Mock(newer=Mock(return_value=None))
    group = JobGroup(control, GlooConnections(), lambda *_: None, HashStore())
    recovery = Recovery(0, session.comms, control, group)
    session.attach_recovery(recovery, Recording(recovery, {"ranks": 2}))
    session.leaves_group, session.event = True, Mock()  # type: ignore[method-assign]
    yield session
    session.leaves_group = False


def said(session: train.Session, name: str) -> list[dict[str, object]]:
    calls = session.event.call_args_list  # type: ignore[attr-defined]
    return [call.kwargs for call in calls if call.args == (name,)]


def trained(session: train.Session, loader: train.Loader, epochs: int) -> None:
    model = session.models.first.model
    for _ in session.epochs(loader, epochs):
        for (inputs,) in loader:
            session.step(model(inputs).square().mean(1))


def test_second_training_prevents_joining(recoverable: train.Session) -> None:
    loader = prepare_training(recoverable)
    trained(recoverable, loader, 2)
    assert not said(recoverable, "door closed")
    trained(recoverable, loader, 4)
    (told,) = said(recoverable, "door closed")
    assert "second session.epochs" in str(told["why"])
    assert said(recoverable, "recoverable") == [
        {"able": True, "why": ""}
    ]  # recovery without newcomers


def test_added_training_part_prevents_joining(recoverable: train.Session) -> None:
    loader = prepare_training(recoverable)
    for epoch in recoverable.epochs(loader, 2):
        for (inputs,) in loader:
            recoverable.step(recoverable.models.first.model(inputs).square().mean(1))
        if epoch == 0:
            recoverable.average()
            prepare_training(recoverable)
    (told,) = said(recoverable, "door closed")
    assert "session.average" in str(told["why"])


@pytest.mark.parametrize(
    "options",
    [{"limit": "n2=3"}, {"limit": {"n2": 2.5}}, {"limit": -3}, {"balance": None},
     {"balance": {"n1": "3"}}, {"balance": {"n1": 1e308}}, {"balance": {3: 1.0}}],
)  # fmt: skip
def test_rejects_invalid_shares_and_limits(session: train.Session, options: dict[str, Any]) -> None:
    data = TensorDataset(torch.zeros(8, 1))
    with pytest.raises(SettingError, match="is not valid"):
        session.loader(data, 4, **options)


def test_limit_none_is_no_limit(session: train.Session) -> None:
    loader = session.loader(TensorDataset(torch.zeros(8, 1)), 4, limit=None)
    assert (loader.limit, loader.has_common_limit) == (0, True)


def test_two_concurrent_loaders_prevent_recovery(recoverable: train.Session) -> None:
    """When a rank is lost, only the loader of ``session.epochs`` is divided again."""
    loader = prepare_training(recoverable)
    other = recoverable.loader(TensorDataset(torch.ones(8, 2)), 4)
    model = recoverable.models.first.model
    for _ in recoverable.epochs(loader, 2):
        for (inputs,), (extra_inputs,) in zip(loader, other, strict=False):
            recoverable.step(model(inputs + extra_inputs).square().mean(1))
    first, second = said(recoverable, "recoverable")
    assert (first["able"], second["able"]) == (True, False)
    assert "two loaders" in str(second["why"])


def test_nccl_error_handling_prevents_recovery(
    recoverable: train.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_training(recoverable)
    assert recoverable._membership._unrecoverable_part() == ""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda *_: "nccl")
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" in recoverable._membership._unrecoverable_part()


def test_newcomer_description_names_its_data(recoverable: train.Session) -> None:
    loader = prepare_training(recoverable)
    next(recoverable.epochs(loader, 2))
    details = recoverable._membership.description()
    assert details["calls of session.epochs"] == "1"
    assert details["training samples"] == "8 of TensorDataset"
    assert details["global batch"] == "4"
    assert details["session.epochs called in"].startswith(
        "test_newcomer_description_names_its_data, line "
    )
