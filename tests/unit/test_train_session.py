"""What a session says when a script uses it in another way than it is meant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch._dynamo  # as the first optimizer does; it leaves a variable behind
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore
from torch.utils.data import TensorDataset

from paceline import train
from paceline.spec.errors import SettingError
from paceline.spec.training.communication import validate
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


def prepared(session: train.Session) -> train.Loader:
    network = session.place(nn.Linear(2, 1))
    session.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
    return session.loader(TensorDataset(torch.zeros(8, 2)), 4)


def test_epochs_are_the_sessions(session: train.Session) -> None:
    with pytest.raises(RuntimeError, match=r"session\.epochs"):
        list(prepared(session))


def test_the_screen_and_the_loop_count_epochs_alike(
    session: train.Session, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line an epoch with the training's and the evaluation's figures; from 0, as the loop."""
    loader, model = prepared(session), session.models.first.model
    for epoch in session.epochs(loader, 3):
        for (inputs,) in loader:
            session.step(model(inputs).square().mean(1))
        if epoch == 1:
            session.log("val", accuracy=0.123456789)
    session.log("test", accuracy=1.0)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    whole = [line for line in lines if "lr" not in line]
    assert [line.split("  ")[:2] for line in whole] == [
        [f"epoch {epoch}", f"step {2 * epoch}/6"] for epoch in (1, 2, 3, 3)
    ]
    assert "train: loss" in whole[1]
    assert whole[1].endswith("val: accuracy 0.1235")
    assert whole[3].endswith("/6  test: accuracy 1")
    records = (session.folder / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["epoch"] for line in records} == {0, 1, 2}


def test_a_finished_training_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for epochs in (4, 2):
        with train.join(run_dir=tmp_path) as session:
            loader, model = prepared(session), session.models.first.model
            session.checkpoints()
            for _ in session.epochs(loader, epochs):
                for (inputs,) in loader:
                    session.step(model(inputs).square().mean(1))
    said = capsys.readouterr().out
    assert "nothing is left to train: step 8, in epoch 4, is done already" in said
    assert "and 4 steps (2 epochs) were asked for" in said


def test_an_epoch_that_is_grouped_by_length_has_each_sample_once_with_any_batch(
    tmp_path: Path,
) -> None:
    seen: list[float] = []
    for batch, steps in ((4, 1), (3, 3), (5, 0)):  # each in the middle of the epoch
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
def test_a_resumed_training_makes_the_epochs_that_are_left(
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
    assert said.count("continuing") == bool(changed)  # not if nothing is left
    assert not changed or f"continuing with {changed}\n" in said
    assert "(1 epoch) were asked for" in said


def test_nothing_is_exchanged_in_a_group_in_which_not_all_have_begun_anew(
    session: train.Session,
) -> None:
    """Also by a rank that has only taken the first of several updates from another."""
    loader = prepared(session)
    for _ in session.epochs(loader, 1):
        for batch in loader:
            session._membership.recovery = Mock(is_batch_void=False, stale=True)
            losses = {UNNAMED: torch.ones(len(batch.ids), requires_grad=True)}
            assert session._loop.steps.backward(batch, losses) is ExchangeResult.VOID
            session._membership.recovery.finish.assert_not_called()
            session._membership.recovery = None
            break
        break


def test_the_loss_of_an_update_is_that_which_it_was_made_with(session: train.Session) -> None:
    """Its batch is given again, as a rank was lost before the step's end; newly divided."""
    network = session.place(nn.Linear(2, 1))
    for name in ("one", "two"):
        session.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1), name=name)
    loader = session.loader(TensorDataset(torch.zeros(8, 2)), 4)
    told = session._journal.record = Mock()  # type: ignore[method-assign]
    passes = 0
    for _ in session.epochs(loader, 1):
        for _ in loader:
            passes += 1
            each = torch.full((4,), float(passes), requires_grad=True)
            session.update("two", each, found=torch.full((4,), 2.0 * passes))
            if passes == 1:
                exchange, session._loop.steps.backward = (
                    session._loop.steps.backward,
                    Mock(return_value=ExchangeResult.VOID),
                )  # type: ignore[method-assign]
            done = session.step({"one": each})
            if passes == 1:
                session._loop.steps.backward = exchange  # type: ignore[method-assign]
            assert done == (passes > 1)
    split, values = told.call_args_list[0].args
    assert (split, passes) == ("train", 3)
    assert (values["samples"], values["one_loss"], values["two_loss"]) == (8, 2.5, 2.0)
    assert (values["found"], session.progress.updated) == (4.0, 0)


def test_what_a_killed_launcher_did_not_hear_is_said_again_by_the_next_run(tmp_path: Path) -> None:
    """In this run directory; a training of another one begins with records of its own."""

    def train_on(folder: Path, steps: int, resume: str) -> list[tuple[str, int, int]]:
        with train.join(run_dir=folder, seed=0, log_every=1, quiet=False) as session:
            loader = prepared(session)
            session.checkpoints(every="epoch", resume=resume)
            for epoch in session.epochs(loader, steps=steps):
                for (inputs,) in loader:
                    session.step(session.models.first.model(inputs).square().mean(1))
                session.log("val", epoch=epoch, time=7)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return [(one["split"], one["step"], int(one["time"])) for one in map(json.loads, lines)]

    ours, other = tmp_path / "ours", tmp_path / "other"
    told = train_on(ours, 4, "auto")
    assert [one[:2] for one in told if one[0] == "val"] == [("val", 2), ("val", 4)]
    kept = (ours / "metrics.jsonl").read_text().splitlines(keepends=True)
    (ours / "metrics.jsonl").write_text("".join(kept[:2]))
    again = train_on(ours, 6, "auto")[: len(told)]
    assert [one[:2] for one in again] == [one[:2] for one in told]
    assert again[2] == ("val", 2, 7)
    assert [one[1] for one in train_on(other, 8, str(ours))] == [7, 8, 8]


def test_who_comes_between_has_measured_nothing_of_it(session: train.Session) -> None:
    meter = session.meter()
    meter.add(4, loss=torch.ones(4))
    meter.add_other_samples(two=torch.empty(0))
    meter.add(2, loss=torch.ones(2), two=torch.tensor([3.0, 5.0]))
    found = meter.result()
    assert (found.count, found["two"], found["loss"], found.counts) == (6, 4.0, 1.0, {"two": 2})


def test_what_a_meter_returns_can_be_logged_as_it_is(session: train.Session) -> None:
    rows = [torch.tensor([float(one)]) for one in range(8)]
    meter = session.meter()
    for (x,) in session.shard(rows):
        meter.add(len(x), size=x.square()[:, 0])
    session.log("test", **(means := meter.result()))
    assert [*means] == ["size"]
    assert means["size"] == 17.5


def test_checkpoints_come_after_prepare(session: train.Session) -> None:
    with pytest.raises(RuntimeError, match=r"session\.prepare comes before"):
        session.checkpoints()


def test_shards_may_be_used_again(session: train.Session) -> None:
    shard = session.shard(TensorDataset(torch.arange(5)), size=2)
    assert len(shard) == 3
    for _ in range(2):
        assert torch.cat([values for (values,) in shard]).tolist() == [0, 1, 2, 3, 4]


def test_stand_ins_never_count() -> None:
    """Two ranks share three samples: the first has nothing to do in one of its batches."""
    real = 0
    for rank in range(2):
        session = train.join(quiet=True)
        alone, meter = session.world, session.meter()
        session.comms.world = replace(alone, rank=rank, size=2)
        for (values,) in session.shard(TensorDataset(torch.ones(3)), size=1):
            meter.add(len(values), hits=values)
        session.comms.world = alone
        assert len(meter.result().sums) == 1
        meter.add(1, hits=torch.ones(1))  # outside of the loop nothing stands in
        assert meter.result().count == 1
        session.comms.world = replace(alone, rank=rank, size=2)
        real += sum(batch.count for batch in session.shard(TensorDataset(torch.ones(3)), size=1))
    assert real == 3


def test_a_meter_takes_one_number_for_each_sample(session: train.Session) -> None:
    meter = session.meter()
    for wrong in (torch.tensor(1.0), torch.ones(4, 2), torch.ones(3)):
        with pytest.raises(ValueError, match="one number for each of the 4 samples, but loss has"):
            meter.add(4, loss=wrong)


def test_every_meter_knows_of_ranks_without_a_share(session: train.Session) -> None:
    meter = session.meter()
    assert meter.empty
    session.progress.some_absent = True
    assert not meter.empty


def test_a_module_keeps_its_precision(session: train.Session) -> None:
    assert session.place(nn.Linear(2, 1).double()).weight.dtype == torch.float64


@pytest.mark.parametrize("shape", [(3,), (4, 2), (8,)])
def test_losses_of_another_shape(session: train.Session, shape: tuple[int, ...]) -> None:
    loader = prepared(session)
    epochs = session.epochs(loader, 1)
    next(epochs)
    batches = iter(loader)
    next(batches)
    with pytest.raises(ValueError, match="one loss for each of the 4 samples"):
        session.step(torch.zeros(shape, requires_grad=True))
    batches.close()
    epochs.close()


def test_determinism_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with train.join(run_dir=tmp_path):
        assert not torch.backends.cudnn.deterministic
        assert not asked
    with train.join(run_dir=tmp_path, deterministic=True):
        assert asked == [True]


def test_ways_to_communicate_that_there_are_not(session: train.Session) -> None:
    network = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    with pytest.raises(SettingError, match="int9: unknown value") as error:
        session.prepare(network, optimizer, communication="int9")
    assert "int8" in error.value.remedy
    for wrong in ("int8:4", "local:1", "local:x", "powersgd", "powersgd:8"):
        with pytest.raises(SettingError, match=wrong):
            session.prepare(network, optimizer, communication=wrong)


def test_ways_that_do_not_go_with_something(tmp_path: Path) -> None:
    network = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    for asked, name in (("auto", "one"), ("local:5", "one")):
        with (
            train.join(run_dir=tmp_path / name, quiet=True) as session,
            pytest.raises(SettingError, match=f"{asked} cannot be combined with several"),
        ):
            session.prepare(network, optimizer, communication=asked, name=name)
    for beside in ("scaled", "sharded", "averaged"):
        with pytest.raises(SettingError, match="local cannot be combined with"):
            validate("local", **{beside: True})


# --- what stands in the way of ranks that come, or are lost


@pytest.fixture
def able(session: train.Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[train.Session]:
    """A session whose events are kept, as under a launcher that can recover."""
    monkeypatch.setattr(waits, "enable", Mock())  # for good, in this process
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


def test_in_a_second_training_nobody_can_join(able: train.Session) -> None:
    loader = prepared(able)
    trained(able, loader, 2)
    assert not said(able, "door closed")
    trained(able, loader, 4)
    (told,) = said(able, "door closed")
    assert "second session.epochs" in str(told["why"])
    assert said(able, "recoverable") == [{"able": True, "why": ""}]  # the others go on


def test_with_another_part_of_the_training_nobody_can_join(able: train.Session) -> None:
    loader = prepared(able)
    for epoch in able.epochs(loader, 2):
        for (inputs,) in loader:
            able.step(able.models.first.model(inputs).square().mean(1))
        if epoch == 0:
            able.average()
            prepared(able)
    (told,) = said(able, "door closed")
    assert "session.average" in str(told["why"])


@pytest.mark.parametrize(
    "how",
    [{"limit": "n2=3"}, {"limit": {"n2": 2.5}}, {"limit": -3}, {"balance": None},
     {"balance": {"n1": "3"}}, {"balance": {"n1": 1e308}}, {"balance": {3: 1.0}}],
)  # fmt: skip
def test_shares_and_limits_that_cannot_be_are_refused(
    session: train.Session, how: dict[str, Any]
) -> None:
    data = TensorDataset(torch.zeros(8, 1))
    with pytest.raises(SettingError, match="is not valid"):
        session.loader(data, 4, **how)


def test_two_loaders_at_once_are_not_recovered_from(able: train.Session) -> None:
    """Only that of `session.epochs` is divided anew when a rank is lost."""
    loader = prepared(able)
    other = able.loader(TensorDataset(torch.ones(8, 2)), 4)
    model = able.models.first.model
    for _ in able.epochs(loader, 2):
        for (inputs,), (more,) in zip(loader, other, strict=False):
            able.step(model(inputs + more).square().mean(1))
    first, second = said(able, "recoverable")
    assert (first["able"], second["able"]) == (True, False)
    assert "two loaders" in str(second["why"])


def test_who_handles_nccls_errors_is_named(
    able: train.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(able)
    assert able._membership._unrecoverable_part() == ""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda *_: "nccl")
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" in able._membership._unrecoverable_part()


def test_a_newcomer_tells_with_which_data_it_comes(able: train.Session) -> None:
    loader = prepared(able)
    next(able.epochs(loader, 2))
    about = able._membership.description()
    assert about["calls of session.epochs"] == "1"
    assert about["training samples"] == "8 of TensorDataset"
    assert about["global batch"] == "4"
    assert about["session.epochs called in"].startswith(
        "test_a_newcomer_tells_with_which_data_it_comes, line "
    )
