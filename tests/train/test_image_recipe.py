"""Tests the image recipe from its flags to predictions, without Paceline's launcher."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from paceline.cli import model_scripts
from paceline.cli.verbs.evaluate import read_model_config
from paceline.recipes import image
from paceline.recipes.data.images import load
from paceline.recipes.options import ImageOptions
from paceline.recipes.use import evaluate, predict
from paceline.train import weights

sys.path.insert(0, str(Path(__file__).parent))
import local_ranks

EXACT = ["--dtype=float64", "--steps=20", "--augment", "flip", "crop", "rotate", "zoom"]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def train(folder: Path, *flags: str) -> int:
    return image.main([f"--run-dir={folder}", "--device=cpu", *flags])


def parameters(folder: Path) -> torch.Tensor:
    state = load_file(folder / "model/model.safetensors")
    assert not any(name.startswith("module.") for name in state)
    return torch.cat([state[name].flatten() for name in sorted(state)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains with the default settings on two ranks; returns the run directory."""
    folder = tmp_path_factory.mktemp("image") / "run"
    ended = local_ranks.run_ok(
        2, ["-m", "paceline.recipes.image", f"--run-dir={folder}"], folder.parent / "logs"
    )
    (folder / "said").write_text(ended[0].out)
    assert ended[1].out == ""
    return folder


def test_default_run_reaches_expected_accuracy(trained: Path) -> None:
    last = (trained / "said").read_text().splitlines()[-1]
    metric, value, *remainder = last.split()
    assert (metric, " ".join(remainder)[-20:]) == ("accuracy", "450 held-out images)")
    assert float(value) >= 0.97


def test_run_directory_contents(trained: Path) -> None:
    config = json.loads((trained / "model/config.json").read_text())
    assert config["classes"] == list("0123456789")
    assert config["metrics"]["test"]["samples"] == 450
    assert json.loads((trained / "config.json").read_text())["options"]["data"] == "digits"
    records = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert len({(entry["split"], entry["step"]) for entry in records}) == len(records)
    assert {entry["split"] for entry in records} - {"pace"} == {
        "train",
        "test",
    }  # "pace": step timings
    num_samples = sum(entry["samples"] for entry in records if entry["split"] == "train")
    assert num_samples == 15 * 1347


def test_evaluation_matches_recorded_accuracy(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    assert evaluate.main([f"--run={trained}", f"--figures={report}"]) == 0
    evaluated = json.loads(report.read_text())
    config = json.loads((trained / "model/config.json").read_text())
    assert evaluated["accuracy"] == config["metrics"]["test"]["accuracy"]
    assert capsys.readouterr().out.startswith(f"accuracy {evaluated['accuracy']:.4f} (")
    assert sorted(path.name for path in trained.iterdir()) == [
        "checkpoints", "config.json", "events.jsonl", "metrics.jsonl", "model", "said",
    ]  # fmt: skip


def test_prediction(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    test = load(ImageOptions()).splits["test"]
    files = []
    for number in range(0, 450, 45):
        path = tmp_path / f"{number}.png"
        Image.fromarray(test.pixels(torch.tensor([number]).numpy())[0, 0]).save(path)
        files.append(str(path))
    status = predict.main([f"--run={trained}", files[0], str(tmp_path / "no.png"), *files[1:]])
    output = capsys.readouterr()
    assert status == 1
    assert "no.png: no such file" in output.err
    guessed = [int(line.split(": ")[1][0]) for line in output.out.splitlines()]
    correct = [label == guess for label, guess in zip(test.labels[::45], guessed, strict=True)]
    assert sum(correct) >= 9


def test_rejects_missing_file(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict.main(["nope.png", f"--run={trained}"]) == 1
    output = capsys.readouterr().err
    assert "nope.png: no such file" in output
    assert "--skip-damaged" not in output


def test_model_folder_is_found_below_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/one/model").mkdir(parents=True)
    (tmp_path / "runs/one/model/config.json").write_text("{}")
    found = tmp_path / "runs/one"
    assert [model_scripts.model_folder(Path(run)) for run in ("one", "runs/one")] == [found, found]


def test_evaluates_checkpoint_of_interrupted_run(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its best checkpoint contains all that an evaluation needs."""
    shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints")
    assert model_scripts.model_folder(tmp_path) == tmp_path
    best = json.loads((trained / "checkpoints/best.json").read_text())["step"]
    assert f"no finished model: using its checkpoint {best}\n" in capsys.readouterr().err
    assert read_model_config(tmp_path)["data"]["source"] == "digits"
    figures = tmp_path / "figures.json"
    assert evaluate.main([f"--run={tmp_path}", f"--figures={figures}"]) == 0
    records = (json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines())
    (recorded,) = [entry for entry in records if (entry["split"], entry["step"]) == ("test", best)]
    assert json.loads(figures.read_text())["accuracy"] == recorded["accuracy"]
    with (tmp_path / f"checkpoints/{best}/weights.safetensors").open("r+b") as file:
        file.truncate(1000)
    assert evaluate.main([f"--run={tmp_path}"]) == 1
    assert "has 1000 bytes instead of" in capsys.readouterr().err


def test_rejects_weights_of_different_network(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after training a changed copy of the recipe."""
    shutil.copytree(trained / "model", tmp_path / "model")
    state = load_file(tmp_path / "model/model.safetensors")
    state["more"] = torch.zeros(1)
    state["wrong"] = state.pop(next(iter(state)))
    weights.save_model(tmp_path, state, json.loads((trained / "model/config.json").read_text()))
    assert evaluate.main([f"--run={tmp_path}"]) == 1
    output = capsys.readouterr().err
    assert "holds the weights of another network than the recipe builds" in output
    assert "is missing; " in output
    assert "own script" in output


def test_rejects_damaged_model(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_bytes((trained / "model" / name).read_bytes())
    with (tmp_path / "model/model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    assert evaluate.main([f"--run={tmp_path}"]) == 1
    assert "hash differs" in capsys.readouterr().err


def test_parameters_do_not_depend_on_world_size(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("image_worlds.py"))
    local_ranks.run_ok(1, [script, str(tmp_path), *EXACT], tmp_path / "logs")
    for size in (2, 4):
        difference = parameters(tmp_path / str(size)) - parameters(tmp_path / "1")
        assert difference.abs().max() < 1e-10


def test_equal_seeds_give_identical_parameters(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert train(tmp_path / name, "--steps=10", f"--seed={seed}", "--augment", "crop") == 0
    assert torch.equal(parameters(tmp_path / "a"), parameters(tmp_path / "b"))
    assert not torch.equal(parameters(tmp_path / "a"), parameters(tmp_path / "c"))


def test_losses_match_golden_file(tmp_path: Path) -> None:
    """Covers everything from files to gradients; change the record only on purpose."""
    golden = Path(__file__).parents[1] / "golden/losses/digits_cnn_float64.json"
    record = json.loads(golden.read_text())
    flags = ["--log-every=1", "--checkpoint-every=never", *record["flags"]]
    assert train(tmp_path, *flags) == 0
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    losses = [entry["loss"] for entry in map(json.loads, lines) if entry["split"] == "train"]
    assert losses == pytest.approx(record["losses"], rel=1e-9)


def test_bf16_trains(tmp_path: Path) -> None:
    assert train(tmp_path, "--steps=30", "--dtype=bf16") == 0
    assert parameters(tmp_path).dtype == torch.float32


def test_invalid_options_report_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", "--backend=nccl") == 2
    assert "nccl moves tensors of cuda devices only" in capsys.readouterr().err
    assert train(tmp_path / "run", f"--data={tmp_path}/nope") == 1
    assert "no such folder" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_sends_metrics_to_launcher(tmp_path: Path) -> None:
    """If the launcher passes a descriptor, the session itself writes no records."""
    folder = tmp_path / "run"
    code = (
        "import os, sys; from paceline.recipes.image import main\n"
        "os.environ['PACELINE_EVENT_FD'] = str(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT))\n"
        "sys.exit(main(['--steps', '5']))"
    )
    lines = tmp_path / "lines"
    ended = local_ranks.run_ok(
        1, ["-c", code, str(lines)], tmp_path / "logs", extra={"PACELINE_RUN_DIR": str(folder)}
    )
    assert ended[0].out == ""
    messages = [json.loads(line) for line in lines.read_text().splitlines()]
    assert {entry["kind"] for entry in messages} == {
        "begin", "event", "metrics", "progress", "say", "heartbeat",
    }  # fmt: skip
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "config.json", "model"]


def test_diverged_training_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--steps", "3", "--lr", "1e9", "--log-every", "1", "--run-dir", str(tmp_path)]
    assert image.main(flags) == 1
    assert "the loss is not finite" in capfd.readouterr().err
