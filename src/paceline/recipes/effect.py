"""Rules that say which options have an effect in combination with others. Needs no torch.

An explicit option without effect is refused, as its user expects one. Options of a preset, an
earlier run or the settings file are dropped instead if the command line makes them ineffective.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from paceline.recipes.argv import as_flags
from paceline.recipes.data import IMAGE_SETS, PAIR_SETS, TABLE_SUFFIXES, TEXT_SETS
from paceline.recipes.language.options import LanguageOptions, SftOptions
from paceline.recipes.options import (
    GENERATED_PAIRS,
    GENERATED_TEXTS,
    IMAGE_MODELS,
    TEXT_MODELS,
    ImageOptions,
    Options,
    TextOptions,
    TranslationOptions,
)
from paceline.spec.errors import SettingError

O = TypeVar("O", bound=Options)  # noqa: E741


@dataclass(frozen=True, slots=True)
class Rule:
    """When an option has an effect.

    Attributes:
        option: Field of the option.
        decided_by: Field that decides.
        reason: Why the option has no effect.
        remedy: Setting with which it has an effect.
    """

    option: str
    decided_by: str
    applies: Callable[[Any], bool]
    reason: str
    remedy: str


def _reads_files(options: Any) -> bool:
    return options.data not in GENERATED_TEXTS or bool(options.test_data)


_HUB_MODEL = "a Hugging Face model by id or folder"
_HUB_DATA = "a Hugging Face data set by id or folder"
_HAS_TOKENIZER = "a pretrained model has a tokenizer of its own"
_UNKNOWN_ADDRESS = "Paceline has no download address for this data set"
_DOWNLOADED = ", ".join(name for name, dataset in IMAGE_SETS.items() if dataset.remote)
_COMMON_RULES = (
    Rule("milestones", "schedule", lambda o: o.schedule == "step",
         "only the schedule step divides the rate at milestones", "--schedule step"),
    Rule("cool_down", "schedule", lambda o: o.schedule == "stable",
         "only the schedule stable has a cool-down of its own", "--schedule stable"),
    Rule("nesterov", "optimizer", lambda o: o.optimizer == "sgd",
         "only sgd has Nesterov's momentum", "--optimizer sgd"),
    Rule("ema_start", "ema", lambda o: o.ema > 0, "there is no moving average", "--ema 0.999"),
)  # fmt: skip
_FILE_RULES = (
    Rule("data_config", "data", lambda o: not o.data.lower().endswith(TABLE_SUFFIXES),
         "it has no configurations", _HUB_DATA),
    Rule("val_fraction", "test_data", lambda o: not o.test_data,
         "the held-out part is given", "data without a held-out part"),
)  # fmt: skip
RULES: dict[type[Options], tuple[Rule, ...]] = {
    ImageOptions: (
        *_COMMON_RULES,
        Rule("from_scratch", "model", lambda o: o.model not in IMAGE_MODELS,
             "this network starts from scratch unless --weights are named", _HUB_MODEL),
        Rule("data_config", "data", lambda o: o.data not in IMAGE_SETS,
             "named data sets have no configurations", _HUB_DATA),
        Rule("test_fraction", "data", lambda o: o.data not in IMAGE_SETS,
             "named data sets have a test part", "--data FOLDER"),
        Rule("skip_damaged", "data", lambda o: o.data not in IMAGE_SETS,
             "named data sets have no image files", "--data FOLDER"),
        Rule("data_dir", "data",
             lambda o: o.data in IMAGE_SETS and bool(IMAGE_SETS[o.data].folders),
             "only files of named data sets are looked for there", "--data FOLDER alone"),
        Rule("mirror", "data", lambda o: o.data in IMAGE_SETS and bool(IMAGE_SETS[o.data].remote),
             _UNKNOWN_ADDRESS, f"one of {_DOWNLOADED}"),
    ),
    TextOptions: (
        *_COMMON_RULES,
        Rule("from_scratch", "model", lambda o: o.model not in TEXT_MODELS,
             "this network starts from scratch unless --weights are named", _HUB_MODEL),
        *(Rule(option, "model", lambda o: o.model in TEXT_MODELS, _HAS_TOKENIZER, "--model small")
          for option in ("tokenizer", "vocab_size")),
        Rule("dropout", "model", lambda o: o.model == "small",
             "only small has a dropout that can be set", "--model small"),
        Rule("data_config", "data", lambda o: o.data not in (*GENERATED_TEXTS, *TEXT_SETS)
             and not o.data.lower().endswith(TABLE_SUFFIXES),
             "it has no configurations", _HUB_DATA),
        Rule("test_fraction", "data", lambda o: o.data not in TEXT_SETS and not o.test_data,
             "the held-out part is given", "data without a held-out part"),
        *(Rule(option, "data", _reads_files, "it is generated: no file is read", "--data FILE.csv")
          for option in ("delimiter", "label_column", "text_column", "data_dir")),
        Rule("mirror", "data", lambda o: o.data in TEXT_SETS,
             _UNKNOWN_ADDRESS, f"one of {', '.join(TEXT_SETS)}"),
    ),
    TranslationOptions: (
        *_COMMON_RULES,
        Rule("data_config", "data", lambda o: o.data not in (*GENERATED_PAIRS, *PAIR_SETS)
             and not o.target and not o.data.lower().endswith(TABLE_SUFFIXES),
             "it has no configurations", _HUB_DATA),
        Rule("val_fraction", "data", lambda o: o.data not in PAIR_SETS,
             "named data sets have a validation part", "--data FILE.tsv"),
        Rule("data_dir", "data", lambda o: o.data not in GENERATED_PAIRS,
             "it is generated: no file is read", "--data FILE.tsv, or a named data set"),
        Rule("mirror", "data", lambda o: o.data in PAIR_SETS,
             _UNKNOWN_ADDRESS, f"one of {', '.join(PAIR_SETS)}"),
    ),
    SftOptions: (
        *_COMMON_RULES,
        *(Rule(option, "method", lambda o: o.method != "full",
               "the whole model is trained, without adapters", "--method lora")
          for option in ("lora_rank", "lora_alpha")),
        Rule("dpo_beta", "objective", lambda o: o.objective == "dpo",
             "there are no preferences", "--objective dpo"),
        Rule("pack", "objective", lambda o: o.objective == "sft",
             "both answers of a pair have a row of their own", "--objective sft"),
        *_FILE_RULES,
    ),
    LanguageOptions: (*_COMMON_RULES, *_FILE_RULES),
}  # fmt: skip
"""Rules of each recipe; options without a rule always have an effect."""


def has_effect(option: str, options: Options) -> bool:
    """Tells whether an option has an effect with these options."""
    return all(rule.applies(options) for rule in RULES[type(options)] if rule.option == option)


def drop_ineffective(
    options: O,
    explicit: Collection[str],
    from_file: Collection[str] = (),
    decided: Collection[str] = (),
) -> O:
    """Resets options without effect to their defaults.

    Args:
        explicit: Fields set on the command line.
        from_file: Fields set in paceline.toml, and not on the command line.
        decided: Fields that the command line, a preset or an earlier run decide. Options of the
            file that they make ineffective are dropped.

    Raises:
        SettingError: An option has no effect though it is explicit, or though the file sets both it
            and the option that decides.
    """
    ineffective = [rule for rule in RULES[type(options)] if not rule.applies(options)]
    for rule in ineffective:
        value = getattr(options, rule.option)
        is_requested = rule.option in explicit or (
            rule.option in from_file and rule.decided_by not in decided
        )
        if is_requested and value:
            flag, decider = (
                f"--{name.replace('_', '-')}" for name in (rule.option, rule.decided_by)
            )
            setting = getattr(options, rule.decided_by)
            context = f"{decider} {setting}" if setting else f"no {decider}"
            raise SettingError(
                f"{' '.join(as_flags(flag, value))} has no effect with {context}",
                found=rule.reason,
                remedy=f"{rule.remedy}, or leave {flag} out",
            )
    defaults: dict[str, Any] = {field.name: field.default for field in fields(options)}
    return replace(options, **{rule.option: defaults[rule.option] for rule in ineffective})
