"""Tests the commands for recipes, without torch, and their reference page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import click
import pytest
from click.testing import CliRunner

from paceline.cli.dispatch import Dispatch
from paceline.cli.recipe_job import (
    check_data_exists,
    check_same_recipe,
    path_input,
    resume_input,
    sent_paths,
    table_to_flags,
    weights_input,
)
from paceline.cli.verbs import recipe as recipe_verb
from paceline.cli.verbs.list import command as listing
from paceline.recipes import RECIPES, load_use_module, parse_options
from paceline.recipes.reference import list_options
from paceline.spec.errors import DataError, SettingError
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Input


def test_list_command() -> None:
    entries = json.loads(CliRunner().invoke(listing, ["--json"]).output)
    assert {entry["name"] for entry in entries if entry["kind"] == "recipes"} == set(RECIPES)
    listing_text = CliRunner().invoke(listing, ["models", "--recipe", "image"]).output
    assert listing_text.splitlines()[0] == "models:"
    builtin_text, weights = listing_text.split("pretrained:\n")
    assert [line.split()[0] for line in builtin_text.splitlines()[1:]] == [
        "cnn",
        "resnet18",
        "resnet34",
        "resnet50",
    ]
    assert "--model microsoft/resnet-50" in weights
    assert "bert" not in weights


@pytest.mark.parametrize("verb", ["train", "forecast"])
def test_error_moves_options_behind_recipe(verb: str) -> None:
    argv = [sys.executable, "-m", "paceline", verb, "--epochs", "3", "image", "--shard"]
    completed = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    assert completed.returncode != 0
    assert "--epochs precedes the name of the recipe" in completed.stderr
    assert f"paceline {verb} image --epochs 3 --shard" in completed.stderr


def test_list_wraps_lines_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    listing.main([], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith(" " * 34) and "CIFAR-10" in line for line in lines)


def test_recipe_copy(tmp_path: Path) -> None:
    target = tmp_path / "mine.py"
    copied = CliRunner().invoke(recipe_verb.command, ["copy", "text", str(target)])
    assert copied.exit_code == 0
    assert target.read_text() == recipe_verb.script("text") != recipe_verb.script("text", True)
    full_copy = CliRunner().invoke(
        recipe_verb.command, ["copy", "--full", "text", str(target), "--force"]
    )
    assert full_copy.exit_code == 0
    assert "train_text(options: TextOptions)" in target.read_text()
    second_copy = CliRunner().invoke(recipe_verb.command, ["copy", "text", str(target)])
    assert isinstance(second_copy.exception, SettingError)
    with pytest.raises(SettingError, match="Did you mean translation"):
        recipe_verb.script("translatoin")
    with pytest.raises(SettingError, match="no short script of the recipe sft"):
        recipe_verb.script("sft")
    assert "def train_sft(" in recipe_verb.script("sft", True)


@pytest.mark.parametrize("name", RECIPES)
def test_reference_texts_are_sentences(name: str) -> None:
    assert all(entry.text.endswith(".") for entry in list_options(RECIPES[name].options))


def test_table_to_flags() -> None:
    table = {"augment": ["flip", "crop"], "freeze": False, "global_batch": 8, "lr": 0.5}
    options = parse_options("image", table_to_flags("image", table))
    assert (options.global_batch, options.lr) == (8, 0.5)
    with pytest.raises(SettingError, match="model"):
        table_to_flags("image", {"modell": "cnn"})


def test_unknown_task() -> None:
    with pytest.raises(DataError, match="recipe 'speech' is not known"):
        load_use_module("speech")


def test_recipe_commands_need_no_torch() -> None:
    code = (
        "import sys; from paceline.recipes import parse_options, RECIPES\n"
        "import paceline.cli.verbs.recipe, paceline.cli.verbs.use\n"
        "import paceline.recipes.catalogue, paceline.recipes.reference\n"
        "for name, recipe in RECIPES.items():\n"
        "    parse_options(name, [f'--{field}=a/b' for field in recipe.options.required])\n"
        "assert not {'torch', 'numpy', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_path_input(tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    file.touch()
    assert path_input(str(file)) == (
        str(file),
        (Input(str(tmp_path), ("small.gguf",), named=True),),
    )
    assert path_input(str(tmp_path)) == (str(tmp_path), (Input(str(tmp_path), named=True),))
    assert path_input("USER/NAME") == ("USER/NAME", ())


def test_weights_input(tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "w.safetensors"
    for step in (5, 10):
        (run / "checkpoints" / str(step)).mkdir(parents=True)
        (run / "checkpoints" / str(step) / "manifest.json").write_text("{}")
    (run / "checkpoints" / "best.json").write_text('{"step": 5}')
    file.write_bytes(b"")
    expected = Input(str(run), ("model", "checkpoints/5", "checkpoints/best.json"))
    assert weights_input(str(run)) == (str(run), (expected,))
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    assert weights_input(str(run))[1] == (Input(str(run), ("model",)),)
    assert weights_input(str(file))[1] == (Input(str(tmp_path), ("w.safetensors",), named=True),)
    assert weights_input("imagenet") == ("imagenet", ())
    assert weights_input("") == ("", ())


def test_imagenet_weights_are_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imagenet").mkdir()
    monkeypatch.chdir(tmp_path)
    assert weights_input("imagenet") == ("imagenet", ())


@pytest.mark.parametrize("name", ["text", "image", "sft"])
def test_model_folder_is_sent_to_hosts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for model in ("bert", "small", "cnn", "torchvision/vit"):
        (tmp_path / model).mkdir(parents=True)
    folder = str(tmp_path / "bert")
    options = parse_options(name, ["--model=./bert", "--data=x/y"])
    assert sent_paths(name, options)["model"] == (folder, (Input(folder, named=True),))
    builtin = {"text": "small", "image": "torchvision/vit", "sft": "USER/NAME"}[name]
    options = parse_options(name, [f"--model={builtin}", "--data=x/y"])
    assert not any(inputs for _, inputs in sent_paths(name, options).values())


def test_checkpoint_to_resume_from_is_sent_to_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for step in (5, 10):
        (tmp_path / "run" / "checkpoints" / str(step)).mkdir(parents=True)
        (tmp_path / "run" / "checkpoints" / str(step) / "manifest.json").write_text("{}")
    (tmp_path / "latest").mkdir()
    for selector in ("auto", "latest", "10", "none"):
        assert resume_input(selector) == (selector, ())
    run, checkpoint = tmp_path / "run", tmp_path / "run" / "checkpoints" / "5"
    (sent,) = resume_input("run")[1]
    assert sent.path == str(run)
    assert "checkpoints/10" in sent.parts
    assert resume_input(str(checkpoint)) == (str(checkpoint), (Input(str(checkpoint)),))


def test_rejects_run_directory_of_different_recipe(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"recipe": "image"}')
    check_same_recipe("text", tmp_path)  # there is no checkpoint to resume from
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    (tmp_path / "checkpoints" / "2" / "manifest.json").touch()
    check_same_recipe("image", tmp_path)
    with pytest.raises(SettingError, match="is a run of another recipe") as caught:
        check_same_recipe("text", tmp_path)
    assert caught.value.found == "image then, text now"


def test_rejects_missing_data_before_start(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "paceline", "train", "text", "--data", "nofile.csv"]
    completed = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert completed.returncode == 2
    assert "--data nofile.csv: no such file or folder" in completed.stderr
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(("recipe", "flag"), [("translation", "--target"), ("text", "--test-data")])
def test_rejects_missing_second_file_before_start(tmp_path: Path, recipe: str, flag: str) -> None:
    (tmp_path / "a.en").write_text("one\ntwo\n")
    argv = [sys.executable, "-m", "paceline", "train", recipe, "--data", "a.en", flag, "a.de"]
    completed = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert completed.returncode == 2
    assert f"{flag} a.de: no such file or folder" in completed.stderr
    assert f"Did you mean {flag} a.en?" in completed.stderr


def test_rejects_missing_relative_data_on_other_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data/txt").mkdir(parents=True)
    ctx = click.Context(click.Command("train"))
    ctx.params["image"] = ""
    dispatch = cast(
        Dispatch, SimpleNamespace(kind="run", scheduler=SimpleNamespace(is_direct=True))
    )

    def check(data: str) -> None:
        options = parse_options("language", ["--data", data])
        check_data_exists(ctx, options, Cluster((Host("n1"),)), dispatch)

    for data in ("data/text", "./data/text", "../nowhere"):
        with pytest.raises(SettingError, match="no such file or folder") as caught:
            check(data)
        assert "give its absolute path" in caught.value.remedy
        assert ("Did you mean --data data/txt?" in caught.value.remedy) is ("text" in data)
    for data in ("data/txt", "/only/on/hosts", "org/name"):
        check(data)
