"""Tests options that have no effect with other options: refused when typed, otherwise ignored."""

from __future__ import annotations

import dataclasses
import datetime
import json
from pathlib import Path

import pytest
import tomllib

from command_lines import overridden
from each_case import each_case
from paceline.cli.recipe_job import table_to_flags
from paceline.recipes import RECIPES, parse_options
from paceline.recipes.argv import to_argv
from paceline.recipes.effect import RULES, has_effect
from paceline.spec.errors import SettingError

HUB = "--data=nobody/nothing"
PRETRAINED = "--model=nobody/nothing"
# (recipe, option) → arguments without which it has no effect, and arguments with which it has one
EXAMPLES: dict[tuple[str, str], tuple[list[str], list[str]]] = {
    ("image", "from_scratch"): (["--model=resnet18", "--from-scratch"], [PRETRAINED]),
    ("image", "data_config"): (["--data-config=x"], [HUB]),
    ("image", "test_fraction"): (["--test-fraction=0.5"], ["--data=photos/"]),
    ("image", "skip_damaged"): (["--skip-damaged"], ["--data=photos/"]),
    ("image", "data_dir"): (["--data=photos/", "--data-dir=x"], ["--data=mnist"]),
    ("image", "mirror"): (["--mirror=http://a"], ["--data=cifar10"]),
    ("text", "from_scratch"): (["--from-scratch"], [PRETRAINED]),
    ("text", "tokenizer"): ([PRETRAINED, "--tokenizer=bpe"], ["--model=words"]),
    ("text", "vocab_size"): ([PRETRAINED, "--vocab-size=9"], ["--model=words"]),
    ("text", "dropout"): (["--model=words", "--dropout=0.2"], ["--model=small"]),
    ("text", "data_config"): (["--data=a.csv", "--data-config=x"], [HUB]),
    ("text", "test_fraction"): (["--data=ag-news", "--test-fraction=0.5"], ["--data=meals"]),
    ("text", "delimiter"): (["--delimiter=;"], ["--data=a.csv"]),
    ("text", "label_column"): (["--label-column=foo"], ["--data=a.csv"]),
    ("text", "text_column"): (["--text-column=foo"], ["--test-data=a.csv"]),
    ("text", "data_dir"): (["--data-dir=x"], ["--data=a.csv"]),
    ("text", "mirror"): (["--mirror=http://a"], ["--data=ag-news"]),
    ("translation", "data_config"): (["--data-config=en-it"], [HUB]),
    ("translation", "val_fraction"): (["--data=multi30k", "--val-fraction=0.2"], ["--data=a.tsv"]),
    ("translation", "data_dir"): (["--data-dir=x"], ["--data=a.tsv"]),
    ("sft", "lora_rank"): (["--method=full", "--lora-rank=4"], ["--method=dora"]),
    ("sft", "lora_alpha"): (["--method=full", "--lora-alpha=4"], ["--method=lora"]),
    ("sft", "dpo_beta"): (["--dpo-beta=0.2"], ["--objective=dpo"]),
    ("sft", "pack"): (["--objective=dpo", "--pack"], ["--objective=sft"]),
    **{
        (name, option): example
        for name in ("sft", "language")
        for option, example in {
            "data_config": (["--data=a.jsonl", "--data-config=x"], [HUB]),
            "val_fraction": (["--test-data=a", "--val-fraction=0.2"], ["--test-data="]),
        }.items()
    },
    ("translation", "mirror"): (["--mirror=http://a"], ["--data=multi30k"]),
    **{
        (name, option): example
        for name in RECIPES
        for option, example in {
            "milestones": (["--milestones", "0.3"], ["--schedule=step"]),
            "cool_down": (["--schedule=linear", "--cool-down=0.3"], ["--schedule=stable"]),
            "nesterov": (["--nesterov"], ["--optimizer=sgd"]),
            "ema_start": (["--ema-start=5"], ["--ema=0.9"]),
        }.items()
    },
}  # fmt: skip


def required_flags(name: str) -> list[str]:
    """Returns values for the required options of a recipe."""
    return [f"--{field}=a/b" for field in RECIPES[name].options.required]


ROWS = [(name, rule.option) for name in RECIPES for rule in RULES[RECIPES[name].options]]


@each_case(("name", "option"), ROWS)
def test_rejects_option_without_effect(name: str, option: str) -> None:
    ineffective_argv, enabling_argv = EXAMPLES[name, option]
    ineffective_argv = overridden(required_flags(name), ineffective_argv)
    flag = "--" + option.replace("_", "-")
    with pytest.raises(SettingError) as caught:
        parse_options(name, ineffective_argv)
    message = caught.value.render()
    assert flag in message.splitlines()[0]
    assert f"or leave {flag} out" in message
    assert caught.value.exit_code == 2
    parsed = parse_options(name, overridden(ineffective_argv, enabling_argv))
    assert has_effect(option, parsed)
    assert parse_options(name, to_argv(parsed)) == parsed


def test_accepts_defaults_and_disabled_flags() -> None:
    for name in RECIPES:
        defaults = parse_options(name, required_flags(name))
        required = dict.fromkeys(RECIPES[name].options.required, "a/b")
        assert defaults == RECIPES[name].options(**required)
    assert parse_options("image", ["--no-nesterov", "--no-skip-damaged"]).optimizer == "adamw"


def test_settings_file_is_validated_like_flags() -> None:
    with pytest.raises(SettingError, match="--skip-damaged has no effect with --data digits"):
        parse_options("image", [], table_to_flags("image", {"skip_damaged": True}))


def test_accepts_host_weights_as_table() -> None:
    table = {"balance": {"n1": 3, "n2": 1.5}, "micro_batch": {"n2": 8}}
    options = parse_options("image", [], table_to_flags("image", table))
    assert (options.balance, options.micro_batch) == ("n1=3,n2=1.5", "n2=8")


def test_error_quotes_dotted_host_name() -> None:
    table = tomllib.loads('[balance]\n"n1.cluster" = 3\nn2.cluster = 1\n')
    with pytest.raises(SettingError, match="balance: n2 has no number") as caught:
        table_to_flags("image", table)
    (remedy_line,) = [line for line in caught.value.render().splitlines() if "remedy" in line]
    table["balance"] |= tomllib.loads(remedy_line.partition(": ")[2])
    del table["balance"]["n2"]
    options = parse_options("image", [], table_to_flags("image", table))
    assert options.balance == "n1.cluster=3,n2.cluster=3"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("drop_slow", "yes"), ("steps", "many"), ("steps", []), ("balance", {"n1": "a"}),
        ("balance", {}), ("balance", True), ("micro_batch", {"n1": 1.5}), ("steps", {"n1": 3}),
        ("steps", datetime.date(2000, 1, 1)), ("data", ["~/.ssh"]),
        ("augment", ["flip", "--data=/home/me"]),
    ],
)  # fmt: skip
def test_invalid_file_value_names_table_and_key(key: str, value: object) -> None:
    with pytest.raises(SettingError, match=r"paceline.toml \[train.image\] " + key):
        table_to_flags("image", {key: value})


@pytest.mark.parametrize(
    ("table", "line", "expected"),
    [
        (
            {"schedule": "step", "milestones": [0.3]},
            ["--schedule", "cosine"],
            ("milestones", (0.5, 0.75)),
        ),
        ({"ema": 0.9, "ema_start": 7}, ["--ema", "0"], ("ema_start", 0)),
        ({"mirror": "http://a"}, ["--data", "digits"], ("mirror", "")),
        ({"data": "mnist", "mirror": "http://a"}, ["--data=digits"], ("mirror", "")),
        ({"optimizer": "sgd", "nesterov": True}, ["--optimizer=adamw"], ("nesterov", True)),
        ({"nesterov": True}, ["--preset=imagenet-example", "--data=dummy"], ("nesterov", True)),
        ({"schedule": "step", "milestones": [0.3]}, ["--lr=1"], ("milestones", (0.3,))),
        (
            {"preset": "imagenet"},
            ["--preset=imagenet-example", "--data=dummy"],
            ("schedule", "step"),
        ),
    ],
)
def test_command_line_overrides_file(
    table: dict[str, object], line: list[str], expected: tuple[str, object]
) -> None:
    options = parse_options("image", line, table_to_flags("image", table))
    assert getattr(options, expected[0]) == expected[1]


def test_rejects_flag_made_ineffective_by_file() -> None:
    file_flags = table_to_flags("image", {"schedule": "cosine"})
    with pytest.raises(SettingError, match="has no effect with --schedule cosine"):
        parse_options("image", ["--milestones", "0.3"], file_flags)


def test_drops_ineffective_options_of_preset_and_earlier_run(tmp_path: Path) -> None:
    preset_options = parse_options(
        "image", ["--preset", "imagenet-example", "--schedule", "cosine"]
    )
    assert preset_options.milestones == (0.5, 0.75)
    assert parse_options("image", to_argv(preset_options)) == preset_options
    first = parse_options("image", ["--schedule=step", "--milestones", "0.3"])
    (tmp_path / "config.json").write_text(json.dumps({"options": dataclasses.asdict(first)}))
    assert parse_options("image", ["--like", str(tmp_path)]).milestones == (0.3,)
    repeated = parse_options("image", ["--like", str(tmp_path), "--schedule=cosine"])
    assert repeated.milestones == (0.5, 0.75)
