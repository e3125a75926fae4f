"""Tests how trained models are exported, measured, quantized, and used for translation."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hub_folders import vit
from PIL import Image
from recipe_tools import hub_variables, one_thread  # noqa: F401 - fixtures

from paceline.recipes import image, load_use_module, text, translation
from paceline.recipes.data.images import load
from paceline.recipes.options import ImageOptions
from paceline.recipes.use import benchmark, evaluate, export, predict, quantize, translate
from paceline.recipes.use.export import spread_ids
from paceline.recipes.use.onnx_file import OnnxNetwork
from paceline.recipes.use.quantize import check_drop
from paceline.spec.errors import DataError, SettingError

pytestmark = pytest.mark.slow

COMMON_FLAGS = ("--device=cpu", "--checkpoint-every=never", "--dropout=0")


@pytest.fixture(scope="module")
def reverser(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a translation model that reverses two or three letters."""
    folder = tmp_path_factory.mktemp("reverse")
    letters = "abcdefgh"
    rows = [[a, b, c] for a in letters for b in letters for c in [*letters, ""]]
    lines = [" ".join(row).strip() + "\t" + " ".join(row[::-1]).strip() for row in rows]
    (folder / "pairs.tsv").write_text("\n".join(lines))
    flags = ["--model=tiny", "--epochs=14", "--lr=4e-3", "--samples=0", "--score-every=99"]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    run, data = folder / "run", f"--data={folder / 'pairs.tsv'}"
    assert (
        translation.main([f"--run-dir={run}", data, *COMMON_FLAGS, *flags, "--global-batch=16"])
        == 0
    )
    torch.set_num_threads(before)
    return run


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("digits") / "run"
    assert image.main([f"--run-dir={run}", *COMMON_FLAGS[:2], "--epochs=3"]) == 0
    return run


@pytest.fixture(scope="module")
def exported(reverser: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports the reversing model as ONNX, once for all tests, as this takes seconds."""
    folder = tmp_path_factory.mktemp("exported")
    assert export.main([f"--run={reverser}", f"--to={folder}"]) == 0
    return folder / "model.onnx"


# -- translating ---------------------------------------------------------------------------


def test_translate_prints_only_translations(
    reverser: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert translate.main([f"--run={reverser}", "a b c", "h g"]) == 0
    assert capsys.readouterr().out == "c b a\ng h\n"


@pytest.mark.parametrize("dash", [(), ("-",)])
def test_translate_reads_stdin_lines(
    dash: tuple[str, ...], reverser: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.StringIO("a b c\n\nd e f\n"))
    assert translate.main([f"--run={reverser}", *dash, "--beam=3"]) == 0
    assert capsys.readouterr().out == "c b a\n\nf e d\n"


def test_saved_translations_reproduce_scores(reverser: Path, tmp_path: Path) -> None:
    import sacrebleu

    rows = [json.loads(line) for line in (reverser / "translations.jsonl").read_text().splitlines()]
    texts = [[row[name] for row in rows] for name in ("translated", "expected")]
    recorded = json.loads((reverser / "model/config.json").read_text())["metrics"]["val"]
    assert recorded["samples"] == len(rows)
    assert recorded["bleu"] == sacrebleu.corpus_bleu(texts[0], [texts[1]]).score
    assert recorded["exact"] >= 0.9
    assert evaluate.main([f"--run={reverser}", f"--figures={tmp_path / 'r.json'}"]) == 0
    assert json.loads((tmp_path / "r.json").read_text()) == {"split": "val", **recorded}


def test_draws_attention(reverser: Path, tmp_path: Path) -> None:
    path = tmp_path / "maps.png"
    assert translate.main([f"--run={reverser}", f"--attention={path}", "a b c"]) == 0
    with Image.open(path) as picture:
        assert picture.size[0] > 200


def test_class_names_cannot_control_terminal() -> None:
    name = "cat\x1b]52;c;cm0gLXJm\x07\x9b2J"
    prediction = predict.Prediction("a.png", torch.tensor([0.9, 0.1]), (name, "dog"))
    assert prediction.line(1) == "a.png: cat 0.9000"
    assert prediction.to_json(1).isprintable()
    assert json.loads(prediction.to_json(1))["class"] == name


def test_predict_error_names_translate_command(
    reverser: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict.main([f"--run={reverser}", "a b"]) == 2
    assert "paceline translate" in capsys.readouterr().err


def test_long_sentences_are_truncated_with_message(
    reverser: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert translate.main([f"--run={reverser}", "a b " * 200]) == 0
    assert "400 tokens was cut to the model's limit of 350" in capsys.readouterr().err


# -- exporting -----------------------------------------------------------------------------


def test_onnx_matches_network_at_different_lengths(reverser: Path, exported: Path) -> None:
    model = load_use_module("translation").portable(str(reverser))
    other = OnnxNetwork(exported, model.names)
    inputs = torch.tensor([[4, 5, 6, 3, 0]] * 3), torch.tensor([[2, 6, 5]] * 3)
    with torch.no_grad():
        assert torch.allclose(other(*inputs), model.network(*inputs), atol=1e-4)
    assert (exported.parent / "tokenizer-source.json").is_file()


@pytest.mark.parametrize("link", ["run/export", "run/export/torch", "run/export/torch/model.pt2"])
def test_does_not_write_through_links_in_run_directory(tmp_path: Path, link: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert export.output_path(run, "export/torch", "") == run / "export/torch"
    (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / link).symlink_to(tmp_path)
    with pytest.raises(SettingError, match="is or holds a link"):
        export.output_path(run, "export/torch", "")
    assert export.output_path(run, "export/torch", str(run / "other")) == run / "other"


def test_linked_tokenizer_is_not_exported(digits: Path, tmp_path: Path) -> None:
    shutil.copytree(digits / "model", tmp_path / "run/model")
    (tmp_path / "key").write_text("PRIVATE")
    (tmp_path / "run/model/a-token.json").symlink_to(tmp_path / "key")
    assert export.main([f"--run={tmp_path / 'run'}", "--format=torch"]) == 0
    names = {path.name for path in (tmp_path / "run/export/torch").iterdir()}
    assert names == {"config.json", "model.pt2"}


def test_torch_program_matches_network(digits: Path, tmp_path: Path) -> None:
    assert export.main([f"--run={digits}", f"--to={tmp_path}", "--format=torch"]) == 0
    program = torch.export.load(str(tmp_path / "model.pt2")).module()
    model = load_use_module("image").portable(str(digits))
    images = torch.rand(5, 1, 8, 8)
    assert torch.allclose(program(images), model.network(images), atol=1e-5)


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "model.pt2"])
def test_export_does_not_replace_files(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / name).write_text("mine")
    assert export.main([f"--run={digits}", f"--to={tmp_path}", "--format=torch"]) == 2
    error = capsys.readouterr().err
    assert f"found:  {name}\n" in error
    assert "name another --to" in error
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("to", ["notes.txt", "notes.txt/export"])
def test_export_refuses_file_as_folder_before_it_writes(
    digits: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    to: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.setattr(export, "write_portable", lambda *_, form: pytest.fail(f"writes {form}"))
    assert export.main([f"--run={digits}", f"--to={tmp_path / to}", "--format=torch"]) == 1
    error = capsys.readouterr().err
    assert f"{to} cannot be written" in error
    assert "name another folder: --to" in error
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_export_does_not_write_into_model_of_unfinished_run(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert export.main([f"--run={digits}", f"--to={tmp_path / 'model'}", "--format=torch"]) == 2
    assert "is for the model of the run" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_export_adds_to_folder_and_replaces_export_in_run(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("mine")
    assert export.main([f"--run={digits}", f"--to={tmp_path}", "--format=torch"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "config.json", "model.pt2"}
    assert "README.md" not in capsys.readouterr().out
    for _ in range(2):
        assert export.main([f"--run={digits}", "--format=torch"]) == 0


def test_quantize_does_not_replace_file(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.safetensors").write_text("mine")
    assert quantize.main([f"--run={digits}", f"--to={tmp_path / 'model.safetensors'}"]) == 2
    assert "would be replaced" in capsys.readouterr().err
    assert (tmp_path / "model.safetensors").read_text() == "mine"


def test_transformers_loads_exported_model(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = tmp_path / "run", tmp_path / "out"
    flags = [f"--model={vit(tmp_path / 'model')}", "--steps=2", "--no-fast", *COMMON_FLAGS[:2]]
    assert image.main([f"--run-dir={run}", *flags]) == 0
    assert export.main([f"--run={run}", f"--to={folder}", "--format=transformers"]) == 0
    import transformers

    loaded = transformers.AutoModelForImageClassification.from_pretrained(folder)
    model = load_use_module("image").portable(str(run))
    images = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.allclose(loaded(pixel_values=images).logits, model.network(images), atol=1e-5)
    assert loaded.config.id2label[3] == "3"
    assert export.main([f"--run={digits}", "--format=transformers"]) == 2
    assert "--format onnx or torch" in capsys.readouterr().err
    assert not (digits / "export/transformers").exists()


# -- measuring and quantizing --------------------------------------------------------------


def test_benchmark(digits: Path, reverser: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in (digits, reverser):
        capsys.readouterr()
        flags = ["--batch", "1", "64", "--iterations=3", "--warm-up=1", "--json"]
        assert benchmark.main([f"--run={run}", *flags]) == 0
        measurements = json.loads(capsys.readouterr().out)["results"]
        assert [measurement["batch"] for measurement in measurements] == [1, 64]
        for (
            measurement
        ) in measurements:  # no comparison of batch sizes: it depends on the load of the CPU
            seconds = measurement["median_ms"] / 1e3
            assert measurement["samples_per_s"] == pytest.approx(
                measurement["batch"] / seconds, rel=1e-3
            )
        assert all(
            measurement["p90_ms"] >= measurement["median_ms"] > 0 for measurement in measurements
        )


def test_quantized_model_is_smaller_and_accurate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = tmp_path / "run", tmp_path / "small.onnx"
    assert text.main([f"--run-dir={run}", *COMMON_FLAGS, "--epochs=2"]) == 0
    capsys.readouterr()
    assert quantize.main([f"--run={run}", f"--to={path}"]) == 0
    printed = capsys.readouterr().out
    assert path.stat().st_size < 0.5 * (run / "model/model.safetensors").stat().st_size
    before, after = (
        float(word) for word in printed.split("accuracy ")[1].split(" (")[0].split(" → ")
    )
    assert before - after <= 0.01
    inputs = np.ones((3, 7), dtype=np.int64), np.ones((3, 7), dtype=bool)
    network = OnnxNetwork(path, ("ids", "mask"))
    assert network(*map(torch.from_numpy, inputs)).shape == (3, 2)


def test_quantized_translation_model(
    reverser: Path,
    exported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "small.onnx"
    monkeypatch.setattr(quantize, "write_onnx", lambda _, target: shutil.copy(exported, target))
    flags = [f"--run={reverser}", f"--to={path}", "--samples=20", "--max-drop=.1"]
    assert quantize.main(flags) == 0
    printed = capsys.readouterr().out
    assert re.search(r"bleu \d+\.\d+ → \d+\.\d+ \(20 samples\)", printed)
    assert f"of the {exported.stat().st_size:,} that paceline export writes" in printed
    assert path.stat().st_size < 0.5 * (reverser / "model/model.safetensors").stat().st_size
    assert translate.main([f"--run={reverser}", f"--onnx={path}", "a b c", "h g"]) == 0
    assert capsys.readouterr().out == "c b a\ng h\n"
    flags = [f"--run={reverser}", f"--onnx={path}", "--batch=2", "--iterations=2", "--json"]
    assert benchmark.main(flags) == 0
    assert json.loads(capsys.readouterr().out)["onnx"] == str(path)
    for verb, extra_flags in ((translate, ["--beam=3", "a b"]), (benchmark, ["--dtype=bf16"])):
        assert verb.main([f"--run={reverser}", f"--onnx={path}", *extra_flags]) == 2
        assert "cannot be combined with --onnx" in capsys.readouterr().err


def test_rejects_onnx_file_of_different_model(
    reverser: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(reverser / "model", run / "model")
    config = json.loads((run / "model/config.json").read_text())
    (run / "model/config.json").write_text(json.dumps({**config, "sha256": "0" * 64}))
    assert translate.main([f"--run={run}", f"--onnx={exported}", "a b"]) == 1
    assert "not made from the model that the run has now" in capsys.readouterr().err


def test_quantized_image_model_uses_calibration(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, digit = tmp_path / "small.onnx", tmp_path / "3.png"
    assert quantize.main([f"--run={digits}", f"--to={path}", "--calibration=64"]) == 0
    assert b"QuantizeLinear" in path.read_bytes()
    assert path.stat().st_size < 0.5 * (digits / "model/model.safetensors").stat().st_size
    picture = load(ImageOptions()).splits["test"].pixels(np.arange(1))[0, 0]
    Image.fromarray(picture).save(digit)
    capsys.readouterr()
    printed = []
    for extra_flags in ([], [f"--onnx={path}"]):
        assert predict.main([f"--run={digits}", "--json", str(digit), *extra_flags]) == 0
        printed.append(json.loads(capsys.readouterr().out)["class"])
    assert printed[0] == printed[1]
    path.write_bytes(b"nothing")
    assert predict.main([f"--run={digits}", f"--onnx={path}", str(digit)]) == 1
    assert "cannot be run" in capsys.readouterr().err


def test_rejects_accuracy_drop() -> None:
    check_drop("accuracy", 0.95, 0.945, 0.01)
    with pytest.raises(DataError, match=r"accuracy 0\.9500 before, 0\.9300 after"):
        check_drop("accuracy", 0.95, 0.93, 0.01)
    check_drop("bleu", 31.0, 30.1, 0.01, 100)
    with pytest.raises(DataError, match=r"more bleu than --max-drop 0\.01"):
        check_drop("bleu", 31.0, 29.9, 0.01, 100)


def test_spread_ids() -> None:
    assert spread_ids(10, 4).tolist() == [0, 2, 5, 7]
    assert spread_ids(3, 0).tolist() == spread_ids(3, 9).tolist() == [0, 1, 2]
