"""Exporting, measuring and quantizing trained models; translating with them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hub_folders import vit
from PIL import Image
from recipe_tools import hub_variables, one_thread  # noqa: F401 - fixtures

from paceline.recipes import image, text, translation, use_of
from paceline.recipes.use import benchmark, evaluate, export, predict, quantize, translate
from paceline.recipes.use.quantize import OnnxNetwork, check_drop
from paceline.spec.errors import DataError

QUICK = ("--device=cpu", "--checkpoint-every=never", "--dropout=0")


@pytest.fixture(scope="module")
def reverser(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A translation model that reverses two or three letters."""
    folder = tmp_path_factory.mktemp("reverse")
    letters = "abcdefgh"
    rows = [[a, b, c] for a in letters for b in letters for c in [*letters, ""]]
    lines = [" ".join(row).strip() + "\t" + " ".join(row[::-1]).strip() for row in rows]
    (folder / "pairs.tsv").write_text("\n".join(lines))
    flags = ["--model=tiny", "--epochs=14", "--lr=4e-3", "--samples=0", "--score-every=99"]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    run, data = folder / "run", f"--data={folder / 'pairs.tsv'}"
    assert translation.main([f"--run-dir={run}", data, *QUICK, *flags, "--global-batch=16"]) == 0
    torch.set_num_threads(before)
    return run


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("digits") / "run"
    assert image.main([f"--run-dir={run}", *QUICK[:2], "--epochs=3"]) == 0
    return run


# -- translating ---------------------------------------------------------------------------


def test_translations_and_nothing_else(reverser: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert translate.main([f"--run={reverser}", "a b c", "h g"]) == 0
    assert capsys.readouterr().out == "c b a\ng h\n"


def test_translating_lines(
    reverser: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a b c\n\nd e f\n"))
    assert translate.main([f"--run={reverser}", "--beam=3"]) == 0
    assert capsys.readouterr().out == "c b a\n\nf e d\n"


def test_outputs_are_kept_and_score_the_same(reverser: Path, tmp_path: Path) -> None:
    import sacrebleu

    rows = [json.loads(line) for line in (reverser / "translations.jsonl").read_text().splitlines()]
    both = [[row[name] for row in rows] for name in ("translated", "expected")]
    recorded = json.loads((reverser / "model/config.json").read_text())["metrics"]["val"]
    assert recorded["samples"] == len(rows)
    assert recorded["bleu"] == sacrebleu.corpus_bleu(both[0], [both[1]]).score
    assert recorded["exact"] >= 0.9
    assert evaluate.main([f"--run={reverser}", f"--json={tmp_path / 'r.json'}"]) == 0
    assert json.loads((tmp_path / "r.json").read_text()) == {"split": "val", **recorded}


def test_attention_is_drawn(reverser: Path, tmp_path: Path) -> None:
    path = tmp_path / "maps.png"
    assert translate.main([f"--run={reverser}", f"--attention={path}", "a b c"]) == 0
    with Image.open(path) as picture:
        assert picture.size[0] > 200


def test_predicting_translations_names_the_right_command(
    reverser: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict.main([f"--run={reverser}", "a b"]) == 2
    assert "paceline translate" in capsys.readouterr().err


def test_long_sentences_are_cut_with_a_word(
    reverser: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert translate.main([f"--run={reverser}", "a b " * 200]) == 0
    assert "400 tokens was cut to the model's limit of 350" in capsys.readouterr().err


# -- exporting -----------------------------------------------------------------------------


def test_onnx_gives_the_network_s_scores_at_other_lengths(reverser: Path, tmp_path: Path) -> None:
    assert export.main([f"--run={reverser}", f"--to={tmp_path}"]) == 0
    model = use_of("translation").portable(str(reverser))
    other = OnnxNetwork(tmp_path / "model.onnx", model.names)
    given = torch.tensor([[4, 5, 6, 3, 0]] * 3), torch.tensor([[2, 6, 5]] * 3)
    with torch.no_grad():
        assert torch.allclose(other(*given), model.network(*given), atol=1e-4)
    assert (tmp_path / "tokenizer-source.json").is_file()


def test_torch_program_gives_the_network_s_scores(digits: Path, tmp_path: Path) -> None:
    assert export.main([f"--run={digits}", f"--to={tmp_path}", "--format=torch"]) == 0
    program = torch.export.load(str(tmp_path / "model.pt2")).module()
    model = use_of("image").portable(str(digits))
    images = torch.rand(5, 1, 8, 8)
    assert torch.allclose(program(images), model.network(images), atol=1e-5)


def test_transformers_loads_its_own_models_again(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = tmp_path / "run", tmp_path / "out"
    flags = [f"--model={vit(tmp_path / 'model')}", "--steps=2", "--no-fast", *QUICK[:2]]
    assert image.main([f"--run-dir={run}", *flags]) == 0
    assert export.main([f"--run={run}", f"--to={folder}", "--format=transformers"]) == 0
    import transformers

    loaded = transformers.AutoModelForImageClassification.from_pretrained(folder)
    model = use_of("image").portable(str(run))
    images = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.allclose(loaded(pixel_values=images).logits, model.network(images), atol=1e-5)
    assert loaded.config.id2label[3] == "3"
    assert export.main([f"--run={digits}", "--format=transformers"]) == 2
    assert "--format onnx or torch" in capsys.readouterr().err


# -- measuring and quantizing --------------------------------------------------------------


def test_benchmark(digits: Path, reverser: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in (digits, reverser):
        capsys.readouterr()
        flags = ["--batch", "1", "64", "--iterations=3", "--warm-up=1", "--json"]
        assert benchmark.main([f"--run={run}", *flags]) == 0
        found = json.loads(capsys.readouterr().out)["results"]
        assert [one["batch"] for one in found] == [1, 64]
        assert found[1]["samples_per_s"] > found[0]["samples_per_s"] > 0
        assert all(one["p90_ms"] >= one["median_ms"] > 0 for one in found)


def test_quantized_model_is_smaller_and_as_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = tmp_path / "run", tmp_path / "small.onnx"
    assert text.main([f"--run-dir={run}", *QUICK, "--epochs=2"]) == 0
    capsys.readouterr()
    assert quantize.main([f"--run={run}", f"--to={path}"]) == 0
    said = capsys.readouterr().out
    assert path.stat().st_size < 0.5 * (run / "model/model.safetensors").stat().st_size
    before, after = (float(word) for word in said.split("accuracy ")[1].split(" (")[0].split(" → "))
    assert before - after <= 0.01
    given = np.ones((3, 7), dtype=np.int64), np.ones((3, 7), dtype=bool)
    network = OnnxNetwork(path, ("ids", "mask"))
    assert network(*map(torch.from_numpy, given)).shape == (3, 2)


def test_loss_of_accuracy_is_refused() -> None:
    check_drop(0.95, 0.945, 0.01)
    with pytest.raises(DataError, match=r"accuracy 0\.9500 before, 0\.9300 after"):
        check_drop(0.95, 0.93, 0.01)
