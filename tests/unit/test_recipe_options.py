"""Tests the conversion between options and flags, and errors that are found before the start."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from each_case import each_case
from paceline.cli import program
from paceline.recipes import RECIPES, parse_options, recipe
from paceline.recipes.argv import option_names, parse, to_argv
from paceline.recipes.data import IMAGE_SETS
from paceline.recipes.options import AUGMENTATIONS, IMAGE_MODELS, ImageOptions
from paceline.recipes.use import PredictOptions
from paceline.spec.errors import PacelineError, SettingError


@given(
    st.builds(
        ImageOptions,
        data=st.sampled_from([*IMAGE_SETS, "./a b", "/x/--y", "~/ü;$HOME"]),
        epochs=st.integers(1, 10**6),
        lr=st.floats(1e-12, 1e3),
        seed=st.integers(0, 2**63),
        augment=st.lists(st.sampled_from(sorted(AUGMENTATIONS)), unique=True).map(tuple),
        run_dir=st.sampled_from(["", "-x", "a b"]),
        dtype=st.sampled_from(["float32", "bf16"]),
    )
)
def test_options_round_trip_through_argv(options: ImageOptions) -> None:
    assert parse_options("image", to_argv(options)) == options


def test_suggests_nearest_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-images").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError, match="did you mean --data my-images"):
        parse_options("image", ["--data", "my-imgs"])


def test_data_sets_need_no_readable_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> NoReturn:
        raise PermissionError

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert parse_options("image", ["--data", "mnist"]).data == "mnist"
    with pytest.raises(SettingError, match="did you mean --data mnist"):
        parse_options("image", ["--data", "mnits"])


def test_defaults_need_no_flags() -> None:
    assert to_argv(ImageOptions()) == []
    assert parse_options("image", []) == ImageOptions()


@each_case(
    ("argv", "told"),
    [
        (["--epoch", "3"], "--epochs"),
        (["--epochs", "x"], "--epochs"),
        (["--dtype", "float33"], "float32"),
        (["--data", "fashon-mnist"], "did you mean --data fashion-mnist?"),
        (["--model", "cmn"], "did you mean --model cnn?"),
        (["--augment", "flop"], "did you mean --augment flip?"),
        (["--global-batch", "0"], "at least 1"),
        (["--lr", "-1"], "greater than 0"),
        (["--lr", "nan"], "greater than 0"),
        (["--test-fraction", "1"], "between 0 and 1"),
        (["--image-size", "4"], "at least 8"),
        (["--stop-at", "90"], "--stop-at 0.9"),
        (["surplus"], "surplus"),
        (["--scale-lr", "linear"], "--batch-per-process"),
        (["--warm-up", "1"], "less than 1"),
        (["--ema", "1"], "less than 1"),
        (["--ema-start", "5"], "--ema 0.999"),
        (["--balance", "n1=3,n2"], "n1=3,n2=1"),
        (["--balance", "n1=0,n2=1"], "greater than 0"),
        (["--balance", "n1=1,n1=2"], "n1 has a weight already"),
        (["--balance", "quick"], "auto, even"),
        (["--balance", "auto", "--shard"], "--shard"),
        (["--balance", "auto", "--communication", "local"], "--balance even"),
        (["--drop-slow"], "--balance auto --drop-slow"),
        (["--overlap", "later"], "backward, auto"),
        (["--overlap", "late"], "--overlap auto"),
    ],
)
def test_rejects_invalid_options(argv: list[str], told: str) -> None:
    with pytest.raises(SettingError) as caught:
        parse_options("image", argv)
    assert told in caught.value.render()
    assert caught.value.exit_code == 2


def test_positional_arguments_may_be_anywhere() -> None:
    arguments = ["--run", "r", "a.png", "--top-k", "2", "-5 b_c", "--json"]
    parsed = parse(PredictOptions, arguments, "paceline predict")
    assert parsed == PredictOptions(("a.png", "-5 b_c"), "r", 2, True)
    assert parse(PredictOptions, [], "paceline predict") == PredictOptions()


def test_underscores_in_flags_become_dashes() -> None:
    parsed = parse_options("image", ["--global_batch=8", "--run_dir", "a_b", "--no_fast"])
    assert set(to_argv(parsed)) == {"--no-fast", "--global-batch=8", "--run-dir=a_b"}


def test_like_repeats_earlier_run(tmp_path: Path) -> None:
    first = parse_options("image", ["--augment", "flip", "--lr", "0.1", "--run-dir", "x"])
    (tmp_path / "config.json").write_text(json.dumps({"options": dataclasses.asdict(first)}))
    repeated = parse_options("image", ["--epochs", "2", "--like", str(tmp_path)])
    assert repeated == dataclasses.replace(first, epochs=2, run_dir="")
    assert parse_options("image", [f"--like={tmp_path}/config.json"]).lr == 0.1


def test_rejects_record_of_different_recipe(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"options": {"beam": 3}}')
    with pytest.raises(SettingError, match="unknown options: beam"):
        parse_options("image", ["--like", str(tmp_path)])
    with pytest.raises(SettingError, match="no options of an earlier run"):
        parse_options("image", ["--like", str(tmp_path / "nope")])


def test_unknown_recipe() -> None:
    with pytest.raises(SettingError, match="Did you mean image"):
        recipe("imgae")


def test_registered_recipes_are_valid() -> None:
    for item in RECIPES.values():
        required_values = dict.fromkeys(item.options.required, "a/b")
        assert item.options(**required_values).validate() is None
        assert item.summary


def test_model_names_match_networks() -> None:
    from paceline.recipes.networks import MODELS as BUILT

    assert list(BUILT) == list(IMAGE_MODELS)


def test_options_need_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from paceline.recipes import parse_options;"
        "parse_options('image', ['--epochs', '2']);"
        "import paceline.recipes.use;"
        "print([name for name in ('torch', 'numpy', 'PIL') if name in sys.modules])"
    )
    source = Path(__file__).parents[2] / "src"
    completed = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
    )
    assert completed.stdout.strip() == "[]", completed.stderr


def test_setting_error_is_paceline_error() -> None:
    assert issubclass(SettingError, PacelineError)


def test_recipe_and_launcher_options_do_not_overlap() -> None:
    """Options of both kinds can be typed in any order after the name of the recipe."""
    command = program.get_command(click.Context(program), "train")
    assert command is not None
    launcher_names = {
        name for item in command.params for name in (*item.opts, *item.secondary_opts)
    }
    for item in RECIPES.values():
        names = {f"--{name}" for name in option_names(item.options)}
        assert names & launcher_names <= {"--backend", "--run-dir", "--keep"}, item.name


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--batch-size=32", "--global-batch"),
        ("--per_device_train_batch_size", "--batch-per-process"),
        ("--learning-rate", "--lr"),
        ("--epoch", "--epochs"),
    ],
)
def test_suggests_option_for_names_of_other_trainers(flag: str, hint: str) -> None:
    with pytest.raises(SettingError) as caught:
        parse_options("image", [flag, "1"])
    assert caught.value.remedy == f"did you mean {hint}?"
