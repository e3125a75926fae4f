"""The reference of recipes, made from their dataclasses: options, and every name that they take.

Needs no torch.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import shutil
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline.recipes import (
    RECIPES,
    options,
    recipe,
)
from paceline.recipes.data import NAMED, PAIRS, TEXTS
from paceline.spec.helptext import WIDTH, Row, Section, render


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One option as people read it.

    Attributes:
        flag: As typed.
        kind: Of the value.
        default: As typed; empty for none.
        text: What it does.
        name: Of the field.
        choices: The values that it may have, where they are few.
    """

    flag: str
    kind: str
    default: str
    text: str
    name: str = ""
    choices: tuple[str, ...] = ()

    def row(self) -> Row:
        """The option in a help."""
        if not self.kind:  # --flag / --no-flag
            return Row(self.flag, self.text, self.default)
        joined = "|".join(self.choices)
        short = bool(joined) and len(joined) <= 24
        value = joined if short else _METAVARS.get(self.kind, "TEXT")
        return Row(f"{self.flag} {value}", self.text, self.default, () if short else self.choices)


_METAVARS = {"whole number": "N", "number": "X", "words": "TEXT…", "one of": "NAME"}


def options_of(name: str) -> list[Option]:
    """The options of a recipe: its own first, then those that every recipe has.

    Raises:
        SettingError: Unknown recipe.
    """
    return options_in(recipe(name).options)


def options_in(kind: type) -> list[Option]:
    """The same for any class of options."""
    texts: dict[str, str] = {}
    for one in reversed(kind.__mro__[:-1]):
        texts |= _texts(one)
    fields = dataclasses.fields(kind)
    own = _texts(kind)
    ordered = sorted(fields, key=lambda field: field.name not in own)
    return [_option(field, texts[field.name]) for field in ordered if _typed(field)]


def _typed(field: dataclasses.Field[Any]) -> bool:
    """Whether a field is an option: not what stands without a flag."""
    return field.name != "run" and not field.metadata.get("positional")


# title → fields, in the order of a help; what stands in none is about model and data
GROUPS: dict[str, tuple[str, ...]] = {
    "Training": (
        "epochs", "steps", "global_batch", "batch_per_process", "micro_batch", "lr", "find_lr",
        "find_batch", "scale_lr",
        "schedule", "milestones", "warm_up", "optimizer", "nesterov", "momentum", "weight_decay",
        "clip_norm", "ema", "ema_start", "label_smoothing", "evaluate_every", "patience", "stop_at",
        "seed",
    ),
    "Computing": ("device", "dtype", "fast", "compile", "shard", "backend", "communication",
                  "overlap", "balance", "drop_slow", "workers"),
    "Run directory and checkpoints": (
        "run_dir", "resume", "checkpoint_every", "keep", "checkpoint_copies", "when_full",
        "log_every", "watch", "watch_devices", "check_every",
    ),
    "Trackers": ("track", "track_project", "track_each_node"),
}  # fmt: skip
AT_HAND = frozenset({
    "preset", "model", "weights", "data", "data_dir", "test_data", "target", "freeze", "augment",
    "image_size", "tokenizer", "epochs", "global_batch", "lr", "schedule", "optimizer", "patience",
    "seed", "device", "dtype", "run_dir", "resume", "checkpoint_every", "track",
})  # fmt: skip


def sections_of(where: str, everything: bool) -> list[Section]:
    """The options of ``MODULE:CLASS`` for a help, in groups where they are many.

    Args:
        where: The class.
        everything: Also those that are rarely needed.
    """
    module, name = where.split(":")
    return sections_in(getattr(importlib.import_module(module), name), everything)


def sections_in(kind: type, everything: bool) -> list[Section]:
    """The same, of a class."""
    rows = {
        option.name: option.row()
        for option in options_in(kind)
        if option.flag and (everything or option.name in AT_HAND)
    }
    grouped = {title: [rows.pop(n) for n in names if n in rows] for title, names in GROUPS.items()}
    if sum(map(len, grouped.values())) < 4:
        return [("Options", [*rows.values(), *itertools.chain(*grouped.values())])]
    return [("Model and data", list(rows.values())), *grouped.items()]


def help_of(kind: type, prog: str, everything: bool) -> str:
    """The help of a recipe's options."""
    sections = sections_in(kind, everything)
    shown = sum(len(rows) for _, rows in sections)
    left = len([option for option in options_in(kind) if option.flag]) - shown
    after = [f"{left} more options: {prog} --help-all"] if left else []
    if prog.startswith("paceline train"):
        after.append("Hosts, processes and what else a run takes: paceline train --help")
    width = shutil.get_terminal_size((WIDTH, 24)).columns
    return render(f"{prog} [OPTIONS]", kind.__doc__ or "", sections, after, width)


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """The source of a module's classes, by name."""
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {one.name: one for one in body if isinstance(one, ast.ClassDef)}


def _texts(kind: type) -> dict[str, str]:
    """The string below each field of a class."""
    tree = _classes(kind.__module__)[kind.__name__]
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = ast.literal_eval(below.value) if isinstance(below, ast.Expr) else ""
            found[field.target.id] = " ".join(text.split())
    return found


def _option(field: dataclasses.Field[Any], text: str) -> Option:
    flag = "--" + field.name.replace("_", "-")
    if str(field.type) in ("bool", "bool | None"):
        default = {"True": "on", "False": "off"}.get(str(field.default), "")
        return Option(f"{flag} / --no-{flag[2:]}", "", default, text, field.name)
    several = field.default if isinstance(field.default, tuple) else (field.default,)
    default = " ".join(map(str, several))
    return Option(flag, _kind(field), default, text, field.name, _choices(field))


def _choices(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    words = str(field.type)
    named = {"Dtype": options.Dtype, "Device": options.Device, "Backend": options.Backend}
    if words in named:
        return tuple(map(str, typing.get_args(named[words])))
    if words.startswith("Literal["):
        return tuple(filter(None, ast.literal_eval(f"[{words[8:-1]}]")))
    return ()


def _kind(field: dataclasses.Field[Any]) -> str:
    words = str(field.type)
    if words.startswith("tuple"):
        return "words"
    if isinstance(field.default, str):
        return "one of" if words.startswith(("Literal", "Dtype", "Device", "Backend")) else "text"
    return "whole number" if isinstance(field.default, int) else "number"


def markdown(name: str) -> str:
    """A table of all options of a recipe."""
    rows = ["| option | default | |", "|---|---|---|"]
    for one in options_of(name):
        default = f"`{one.default}`" if one.default else ""
        rows.append(f"| `{one.flag}` | {default} | {one.text.replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n"


@dataclass(frozen=True, slots=True)
class Entry:
    """Something with a name.

    Attributes:
        kind: ``recipes``, ``models``, ``data``, ``augmentations`` or ``presets``.
        name: As typed.
        recipe: The recipe that takes it.
        summary: One line for people.
    """

    kind: str
    name: str
    recipe: str
    summary: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def catalogue() -> list[Entry]:
    """All entries, in the order in which they are listed."""
    sizes = {name: _size(numbers) for name, numbers in options.TRANSLATION_SIZES.items()}
    images, texts, pairs = (
        {name: named.summary for name, named in sets.items()} for sets in (NAMED, TEXTS, PAIRS)
    )
    presets = {name: " ".join(flags) for name, flags in options.IMAGE_PRESETS.items()}
    return [
        *(Entry("recipes", one.name, one.name, one.summary) for one in RECIPES.values()),
        *_entries("models", "image", options.IMAGE_MODELS),
        *_entries("models", "text", options.TEXT_MODELS),
        *_entries("models", "translation", sizes),
        *_entries("data", "image", images),
        *_entries("data", "text", {**options.MADE_TEXTS, **texts}),
        *_entries("data", "translation", {**options.MADE_PAIRS, **pairs}),
        *_entries("augmentations", "image", options.AUGMENTATIONS),
        *_entries("presets", "image", presets),
    ]


def _entries(kind: str, recipe: str, names: Mapping[str, str]) -> Iterator[Entry]:
    return (Entry(kind, name, recipe, summary) for name, summary in names.items())


def _size(numbers: Iterable[int]) -> str:
    labels = ("d_model", "layers", "heads", "ff")
    return ", ".join(f"{label} {n}" for label, n in zip(labels, numbers, strict=True))
