"""Tests several models in a session, averages of weights, and callbacks, in one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer imports it, and it sets a variable
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import TensorDataset

from paceline import train
from paceline.spec.errors import JobError, SettingError
from paceline.train.comms import Comms
from paceline.train.measure.watch import Norms, Usage
from paceline.train.metrics import Means, Meter
from paceline.train.models import Models
from paceline.train.parallel import Replica
from paceline.train.update import Updater
from paceline.train.weights import load_weights
from paceline.train.world import World

SAMPLES = torch.arange(8.0)[:, None]


@pytest.fixture
def session(tmp_path: Path) -> Iterator[train.Session]:
    with train.join(run_dir=tmp_path, seed=0) as session:
        yield session


def make_model(session: train.Session, name: str = "", lr: float = 0.01) -> nn.Module:
    network = session.place(nn.Linear(1, 1, bias=False))
    nn.init.ones_(network.weight)  # type: ignore[arg-type]
    return session.prepare(network, torch.optim.SGD(network.parameters(), lr=lr), name=name)


def make_loader(session: train.Session, **options: Any) -> train.Loader:
    return session.loader(TensorDataset(SAMPLES), 4, shuffle=False, **options)


def squares(network: nn.Module, inputs: Tensor) -> Tensor:
    return network(inputs).square().mean(1)


def run_epoch(
    session: train.Session, loader: train.Loader, act: Callable[[Tensor], object]
) -> None:
    """Runs one epoch that calls ``act`` in each step."""
    for _ in session.epochs(loader, 1):
        for (inputs,) in loader:
            act(inputs)


def test_single_process_keeps_communication_state(session: train.Session) -> None:
    """Residuals of several ranks stay in the checkpoint; other ranks do not take them from here."""
    make_model(session)
    updater = session.models.first
    saved_state = {"method": "int8", "rests": {"weight": torch.ones(2, 1, 1)}}
    updater.load_state({**updater.state(), "communication": saved_state})
    assert updater.state()["communication"] is saved_state
    assert "communication" not in updater.state(replicated_only=True)


def test_rejects_loss_that_omits_parameters() -> None:
    """The error comes before other communication, which would mismatch that of the other ranks."""

    def copy_bucket(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        for unused in (False, True):
            layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
            optimizer = torch.optim.SGD(layers.parameters())
            updater = Updater(layers, optimizer, None, None, None)
            updater.model = replica = Replica(layers, find_unused_parameters=unused)
            replica.register_comm_hook(None, copy_bucket)
            models = Models({"": updater})
            for last in (False, True):
                with models.unsynced() if not last else nullcontext():
                    models.backward("", replica(torch.ones(1, 2)).sum(), is_last=last)
            updater.update()
            replica.module = layers[:1]  # only this rank skips a branch
            loss = replica(torch.ones(1, 2)).sum()
            replica.module = layers
            if unused:
                models.backward("", loss, is_last=True)
                continue
            with pytest.raises(JobError, match="got no gradient") as caught:
                models.backward("", loss, is_last=True)
            assert "1.weight, 1.bias, 2.weight, 2.bias" in caught.value.found
            assert "unused=True" in caught.value.remedy
    finally:
        dist.destroy_process_group()


def test_replica_exchanges_only_current_parameters() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        replica = Replica(layers)
        layers[0].weight.requires_grad_(False)  # still averaged
        layers[1] = nn.Linear(2, 3)
        assert replica.has_new_parameters
        replica.include_trained()
        assert replica.exchanged == set(layers.parameters())
    finally:
        dist.destroy_process_group()


def test_loss_updates_only_its_model(session: train.Session) -> None:
    one, other = make_model(session, "one"), make_model(session, "other")
    loader = make_loader(session)
    for _ in session.epochs(loader, 1):
        for (inputs,) in loader:
            session.step({"one": squares(other, one(inputs))})
    assert one.weight.item() < 1 == other.weight.item()  # type: ignore[operator]
    assert other.weight.grad is None


def test_switches_restore_frozen_parameters_and_mode(session: train.Session) -> None:
    """Its script may have passed the line that froze or unfroze a part, or set its mode."""
    network = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    network[0].requires_grad_(False)
    model = session.place(network)
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    switches = session.models.switches
    assert switches == {"frozen": ["0.weight", "0.bias"], "exchanged": [], "evaluated": []}
    network[0].requires_grad_(True), network[2].requires_grad_(False), network[1].eval()
    session.models.switches = switches
    assert [one.requires_grad for one in model.parameters()] == [False, False, *[True] * 4]
    assert all(part.training for part in model.modules())


def test_update_applies_immediately(session: train.Session) -> None:
    one, other = make_model(session, "one"), make_model(session, "other")
    loader, seen = make_loader(session), []
    for _ in session.epochs(loader, 1):
        for (inputs,) in loader:
            for _ in range(2):
                session.update("one", squares(one, inputs))
                seen.append(one.weight.item())
            session.step({"other": squares(other, inputs)})
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) == 4
    assert session.progress.step == 2


def test_losses_may_share_graph(session: train.Session) -> None:
    one, other = make_model(session, "one"), make_model(session, "other")
    loader = make_loader(session)
    for _ in session.epochs(loader, 1):
        for (inputs,) in loader:
            losses = squares(other, one(inputs))
            session.step({"one": losses, "other": -losses})
    assert one.weight.item() < 1 < other.weight.item()  # type: ignore[operator]


def test_update_rejects_partial_batch(session: train.Session) -> None:
    one, loader = make_model(session, "one"), make_loader(session, limit=2)
    with pytest.raises(RuntimeError, match="needs a whole batch"):
        run_epoch(session, loader, lambda inputs: session.update("one", squares(one, inputs)))


def test_rejects_missing_and_unknown_model_names(session: train.Session) -> None:
    model = make_model(session, "one")
    with pytest.raises(ValueError, match="each needs a name"):
        make_model(session)
    with pytest.raises(ValueError, match="not an identifier"):
        make_model(session, "not.one")
    loader = make_loader(session)
    losses = squares(model, SAMPLES[:4])
    with pytest.raises(ValueError, match="under the names 'one', but given was none"):
        run_epoch(session, loader, lambda inputs: session.step(losses))
    with pytest.raises(ValueError, match="under the names 'one', but given was 'two'"):
        run_epoch(session, loader, lambda inputs: session.step({"two": losses}))


def test_meter_counts_metrics_separately() -> None:
    meter = Meter(lambda vector: vector, torch.device("cpu"))
    meter.add(2, often=torch.ones(2), seldom=torch.tensor([1.0, 2.0]))
    meter.add(2, often=torch.ones(2))
    means = meter.result()
    assert means.values() == {"often": 1.0, "seldom": 1.5}
    combined = means + Means(4, {"often": 8.0, "new": 2.0})
    assert combined.values() == {"new": 0.5, "often": 1.5, "seldom": 1.5}


def test_mean_of_no_samples_says_so() -> None:
    meter = Meter(lambda vector: vector, torch.device("cpu"))
    for count in (0, 1):
        if count:
            meter.add(0, loss=torch.ones(1))
        means = meter.result()
        assert {**means} == {}
        with pytest.raises(KeyError, match="loss: no sample was counted"):
            means["loss"]


def test_weight_average_matches_reference(session: train.Session) -> None:
    """Compared with own code and with torch: the average begins after ``start``."""
    model, loader = make_model(session), make_loader(session)
    average = session.average(0.5, start=1)
    weights = []
    for _ in session.epochs(loader, 2):
        for (inputs,) in loader:
            session.step(squares(model, inputs))
            weights.append(model.weight.item())
    expected = weights[0]
    for one in weights[1:]:
        expected = 0.5 * expected + 0.5 * one
    with average.applied() as averaged:
        assert averaged.weight.item() == pytest.approx(expected, rel=1e-6)
        assert model.weight.item() != weights[-1]
    assert model.weight.item() == weights[-1]
    session.save_model({}, average=True)
    saved = nn.Linear(1, 1, bias=False)
    load_weights(session.folder, saved)
    assert saved.weight.item() == pytest.approx(expected, rel=1e-6)


def test_checkpoint_during_average_saves_trained_weights(tmp_path: Path) -> None:
    with train.join(run_dir=tmp_path) as session:
        model, loader = make_model(session), make_loader(session)
        average = session.average(0.9)
        session.checkpoints(every="never", describes={"task": "x"})
        assert session._checkpoints.keeper is not None
        for _ in session.epochs(loader, 1):
            for (inputs,) in loader:
                session.step(squares(model, inputs))
            weight = model.weight.item()
            with average.applied():
                averaged = model.weight.item()
                session._checkpoints.keeper.save()
                assert model.weight.item() == averaged
    with train.join(run_dir=tmp_path) as session:
        model, average = make_model(session), session.average(0.9)
        assert session.checkpoints()
        assert model.weight.item() == weight != averaged
        with average.applied():
            assert model.weight.item() == averaged
        assert average.updates == 2
    loaded = nn.Linear(1, 1, bias=False)  # like evaluate and predict
    load_weights(tmp_path, loaded)
    assert loaded.weight.item() == averaged
    with train.join(run_dir=tmp_path) as session:  # the average is no longer requested
        model = make_model(session)
        assert session.checkpoints()
        assert model.weight.item() == weight


@pytest.mark.parametrize(("decay", "start"), [(1.0, 0), (-0.1, 0), (0.9, -1)])
def test_rejects_invalid_average(session: train.Session, decay: float, start: int) -> None:
    make_model(session)
    with pytest.raises(SettingError, match="cannot be"):
        session.average(decay, start=start)


class RecordingCallback(train.Callback):
    """Records the calls."""

    def __init__(self) -> None:
        self.describe: list[Any] = []

    def after_step(self, session: train.Session, step: int) -> None:
        self.describe.append(step)

    def epoch_ended(self, session: train.Session, epoch: int) -> None:
        self.describe.append(f"epoch {epoch}")

    def evaluated(self, session: train.Session, split: str, values: Mapping[str, Any]) -> None:
        self.describe.append((split, dict(values)))

    def checkpoint_saved(self, session: train.Session, step: int) -> None:
        self.describe.append(f"saved {step}")


def test_callback_order(tmp_path: Path) -> None:
    callback = RecordingCallback()
    with train.join(run_dir=tmp_path) as session:
        model, loader = make_model(session), make_loader(session)
        session.checkpoints()
        session.add(callback)
        for _ in session.epochs(loader, 1, every=1):
            for (inputs,) in loader:
                session.step(squares(model, inputs))
            session.log("val", radius=2)
    assert callback.describe == [
        1,
        ("val", {"radius": 2}),
        2,
        ("val", {"radius": 2}),
        "epoch 0",
        "saved 2",
    ]


def test_callback_error_ends_rank(session: train.Session) -> None:
    class Broken(train.Callback):
        def after_step(self, session: train.Session, step: int) -> None:
            raise KeyError("x")

    session.add(Broken())
    model, loader = make_model(session), make_loader(session)
    with pytest.raises(JobError, match=r"Broken\.after_step failed after step 1") as caught:
        run_epoch(session, loader, lambda inputs: session.step(squares(model, inputs)))
    assert isinstance(caught.value.__cause__, KeyError)


def test_replaced_model_closes_its_exchange(session: train.Session) -> None:
    """Otherwise its thread would continue, and pending updates would keep its parameters alive."""
    closed: list[str] = []

    class Wire:
        def close(self) -> None:
            closed.append(", ".join(f"{one:g}" for one in session.models.learning_rates.values()))

        def leave_group(self) -> None:
            closed.append("its group")

    def add_model(lr: float) -> None:
        make_model(session, lr=lr)
        session.models.first.exchange = Wire()  # type: ignore[assignment]

    add_model(0.01)
    session._loop.bucket_trial = object()  # type: ignore[assignment]
    with pytest.raises(SettingError):  # an invalid model replaces nothing
        session.prepare(nn.Linear(1, 1), session.models.first.optimizer, communication="int9")
    assert session._loop.bucket_trial is not None
    add_model(0.02)
    assert closed == ["0.01", "its group"]  # before another one replaced it
    assert session._loop.bucket_trial is None
    session.models.close()
    assert closed == ["0.01", "its group", "0.02"]
    session.models.first.exchange = None


def records(session: train.Session, split: str) -> list[dict[str, Any]]:
    lines = (session.folder / "metrics.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["split"] == split]


def test_watch_records_norms_and_usage(session: train.Session) -> None:
    """Computed by hand: the gradient of mean((w x)²) is 2 w mean(x²); one step is clipped."""
    network = session.place(nn.Linear(1, 1, bias=False))
    nn.init.ones_(network.weight)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    model = session.prepare(network, optimizer, clip_norm=1.0)
    session.watch(every=2, devices=True)
    run_epoch(session, make_loader(session), lambda x: session.step(squares(model, x)))
    (norms,) = records(session, "norms")
    weight = 0.9  # the first step had norm 1, times the learning rate
    assert norms["step"] == 2
    assert norms["weight_norm"] == pytest.approx(weight)
    assert norms["grad_norm"] == pytest.approx(2 * weight * (16 + 25 + 36 + 49) / 4)
    assert norms["update_ratio"] == pytest.approx(0.1 / weight)
    (usage,) = records(session, "usage")
    assert usage["memory_gib"] > 0
    assert {"cpu_percent", "host_cpu_percent", "host_memory_percent"} < usage.keys()
    assert not any(name.startswith("gpu") for name in usage)


def test_norms_per_parameter_group() -> None:
    one, other = (nn.Parameter(torch.full((4,), value)) for value in (1.0, 2.0))
    optimizer = torch.optim.SGD([{"params": [one]}, {"params": [other], "lr": 0.0}], lr=0.5)
    (one.sum() + 3 * other.sum()).backward()  # type: ignore[no-untyped-call]
    norms = Norms(optimizer)
    optimizer.step()
    figures = norms.figures()
    assert figures["grad_norm_group0"] == 2
    assert figures["grad_norm_group1"] == 6
    assert figures["grad_norm"] == pytest.approx(40**0.5)
    assert figures["update_ratio_group0"] == 0.5
    assert figures["update_ratio_group1"] == 0


def test_usage_omits_unavailable_gpu_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers an NVIDIA GPU without NVML, with the errors that torch raises then."""

    class Library:
        @staticmethod
        def utilization(device: torch.device) -> int:
            raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

        @staticmethod
        def max_memory_allocated(device: torch.device) -> int:
            return 3 << 29

        @staticmethod
        def mem_get_info(device: torch.device) -> tuple[int, int]:
            return 1 << 30, 4 << 30

    monkeypatch.setattr(torch, "get_device_module", lambda device: Library)
    figures = Usage(Comms(World(), torch.device("cuda", 0))).figures()
    assert figures["gpu_memory_gib"] == 1.5
    assert figures["gpu_memory_percent"] == 75
    assert "gpu_percent" not in figures
