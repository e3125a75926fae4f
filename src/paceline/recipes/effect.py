"""Which settings have an effect beside which others: a table, and what is said where one has none.

A setting that is asked for and does nothing is refused, for who types it believes that it counts.
What a preset, an earlier run or the settings file brings along falls away instead, where something
else was said on the command line. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from paceline.recipes.argv import as_flags
from paceline.recipes.data import FILES, NAMED, PAIRS, TEXTS
from paceline.recipes.options import (
    IMAGE_MODELS,
    MADE_PAIRS,
    MADE_TEXTS,
    TEXT_MODELS,
    ImageOptions,
    Options,
    TextOptions,
    TranslationOptions,
)
from paceline.spec.errors import SettingError

O = TypeVar("O", bound=Options)  # noqa: E741


@dataclass(frozen=True, slots=True)
class Effect:
    """When a setting has an effect.

    Attributes:
        option: Its field.
        beside: Field that decides.
        when: Whether it has one with these options.
        found: Why not, otherwise.
        remedy: What gives it one.
    """

    option: str
    beside: str
    when: Callable[[Any], bool]
    found: str
    remedy: str


def _reads_files(options: Any) -> bool:
    """A text data set with columns of its own: neither generated nor without a file beside it."""
    return options.data not in MADE_TEXTS or bool(options.test_data)


EVERYWHERE = (
    Effect("milestones", "schedule", lambda o: o.schedule == "step",
           "only the schedule step divides the rate at milestones", "--schedule step"),
    Effect("nesterov", "optimizer", lambda o: o.optimizer == "sgd",
           "only sgd has Nesterov's momentum", "--optimizer sgd"),
    Effect("ema_start", "ema", lambda o: o.ema > 0,
           "there is no average that could begin", "--ema 0.999"),
)  # fmt: skip
"""Of every recipe."""
TABLE: dict[type[Options], tuple[Effect, ...]] = {
    ImageOptions: (
        *EVERYWHERE,
        Effect("from_scratch", "model", lambda o: o.model not in IMAGE_MODELS,
               "this network starts from scratch unless --weights are named",
               "a Hugging Face model by id or folder"),
        Effect("data_config", "data", lambda o: o.data not in NAMED,
               "a set of a name has no configurations", "a Hugging Face data set by id or folder"),
        Effect("test_fraction", "data", lambda o: o.data not in NAMED,
               "a set of a name has a test part of its own", "--data FOLDER"),
        Effect("skip_damaged", "data", lambda o: o.data not in NAMED,
               "no image files are decoded of a set of a name", "--data FOLDER"),
        Effect("data_dir", "data", lambda o: o.data in NAMED and bool(NAMED[o.data].folders),
               "only the files of a set of a name are looked for there",
               "--data FOLDER alone for a folder of yours"),
        Effect("mirror", "data", lambda o: o.data in NAMED and bool(NAMED[o.data].remote),
               "nothing of it is downloaded from an address that is known here",
               f"one of {', '.join(name for name, one in NAMED.items() if one.remote)}"),
    ),
    TextOptions: (
        *EVERYWHERE,
        Effect("from_scratch", "model", lambda o: o.model not in TEXT_MODELS,
               "this network starts from scratch unless --weights are named",
               "a Hugging Face model by id or folder"),
        Effect("tokenizer", "model", lambda o: o.model in TEXT_MODELS,
               "a pretrained model has a tokenizer of its own", "--model small"),
        Effect("vocab_size", "model", lambda o: o.model in TEXT_MODELS,
               "a pretrained model has a tokenizer of its own", "--model small"),
        Effect("dropout", "model", lambda o: o.model == "small",
               "only small has a dropout that can be set", "--model small"),
        Effect("data_config", "data", lambda o: o.data not in (*MADE_TEXTS, *TEXTS)
               and not o.data.lower().endswith(FILES),
               "it has no configurations", "a Hugging Face data set by id or folder"),
        Effect("test_fraction", "data", lambda o: o.data not in TEXTS and not o.test_data,
               "the held-out part is given", "data without a part that is held out"),
        Effect("delimiter", "data", _reads_files,
               "it is generated: no file is read", "--data FILE.csv"),
        Effect("label_column", "data", _reads_files,
               "it is generated and has no columns", "--data FILE.csv"),
        Effect("text_column", "data", _reads_files,
               "it is generated and has no columns", "--data FILE.csv"),
        Effect("data_dir", "data", _reads_files,
               "it is generated: no file is looked for", "--data FILE.csv, or a set of a name"),
        Effect("mirror", "data", lambda o: o.data in TEXTS,
               "nothing of it is downloaded from an address that is known here",
               f"one of {', '.join(TEXTS)}"),
    ),
    TranslationOptions: (
        *EVERYWHERE,
        Effect("data_config", "data", lambda o: o.data not in (*MADE_PAIRS, *PAIRS)
               and not o.target and not o.data.lower().endswith(FILES),
               "it has no configurations", "a Hugging Face data set by id or folder"),
        Effect("val_fraction", "data", lambda o: o.data not in PAIRS,
               "a set of a name has a validation part of its own", "--data FILE.tsv"),
        Effect("data_dir", "data", lambda o: o.data not in MADE_PAIRS,
               "it is generated: no file is looked for", "--data FILE.tsv, or a set of a name"),
        Effect("mirror", "data", lambda o: o.data in PAIRS,
               "nothing of it is downloaded from an address that is known here",
               f"one of {', '.join(PAIRS)}"),
    ),
}  # fmt: skip
"""Of each recipe; what stands in none of them always has an effect."""


def has_effect(option: str, options: Options) -> bool:
    """Whether a setting does something with these options."""
    return all(one.when(options) for one in TABLE[type(options)] if one.option == option)


def settled(options: O, typed: Collection[str], filed: Collection[str] = (),
            decided: Collection[str] = ()) -> O:  # fmt: skip
    """The options without what has no effect.

    Args:
        options: Valid ones.
        typed: Fields that were set on the command line.
        filed: Fields that were set in paceline.toml, and not on the command line.
        decided: Fields that the command line decides, by what is typed, a preset or an earlier run:
            what the file says beside one of them and has no effect with it falls away.

    Raises:
        SettingError: What was typed, or in the file beside others of the file, has no effect.
            Switching off what is not there is no error.
    """
    idle = [one for one in TABLE[type(options)] if not one.when(options)]
    for one in idle:
        value = getattr(options, one.option)
        counts = one.option in typed or (one.option in filed and one.beside not in decided)
        if counts and value:
            flag, other = ("--" + name.replace("_", "-") for name in (one.option, one.beside))
            decides = getattr(options, one.beside)
            beside = f"{other} {decides}" if decides else f"no {other}"
            raise SettingError(
                f"{' '.join(as_flags(flag, value))} has no effect with {beside}",
                found=one.found,
                remedy=f"{one.remedy}, or leave {flag} out",
            )
    usual: dict[str, Any] = {field.name: field.default for field in fields(options)}
    fallen: dict[str, Any] = {one.option: usual[one.option] for one in idle}
    return replace(options, **fallen)
