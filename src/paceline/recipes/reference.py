"""Help and reference tables of options, made from their dataclasses. Needs no torch."""

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
from typing import Any, Literal

from paceline.spec.helptext import WIDTH, Row, Section, render


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One option, as the help shows it.

    Attributes:
        flag: As typed, such as ``--lr``.
        kind: Kind of the value; empty for a switch.
        default: Default value as typed; empty for none.
    """

    flag: str
    kind: str
    default: str
    text: str
    name: str = ""
    choices: tuple[str, ...] = ()

    def row(self) -> Row:
        """Returns the option's row in a help page."""
        if not self.kind:  # --flag / --no-flag
            return Row(self.flag, self.text, self.default)
        choices = "|".join(self.choices)
        is_short = bool(choices) and len(choices) <= 24
        value = choices if is_short else _METAVARS.get(self.kind, "TEXT")
        return Row(
            f"{self.flag} {value}", self.text, self.default, () if is_short else self.choices
        )


_METAVARS = {"whole number": "N", "number": "X", "words": "TEXT…", "one of": "NAME"}


def list_options(kind: type) -> list[Option]:
    """Lists the options of a class: those it defines first, then the inherited ones it uses."""
    texts: dict[str, str] = {}
    for cls in reversed(kind.__mro__[:-1]):
        texts |= _field_texts(cls)
    hints = typing.get_type_hints(kind)
    own_texts = _field_texts(kind)
    # "run" and positional fields are arguments of the command, not options
    omitted = {"run", *getattr(kind, "unused", ())}
    fields = [
        field
        for field in dataclasses.fields(kind)
        if field.name not in omitted and not field.metadata.get("positional")
    ]
    fields.sort(key=lambda field: field.name not in own_texts)
    return [_option(field, hints[field.name], texts[field.name]) for field in fields]


# Title → fields, in the order of a help page; all others are about model and data.
GROUPS: dict[str, tuple[str, ...]] = {
    "Training": (
        "epochs", "steps", "global_batch", "batch_per_process", "micro_batch", "lr", "find_lr",
        "find_batch", "scale_lr",
        "schedule", "milestones", "cool_down", "warm_up", "optimizer", "nesterov", "momentum",
        "weight_decay", "clip_norm", "ema", "ema_start", "label_smoothing", "evaluate_every",
        "patience", "stop_at", "seed",
    ),
    "Computing": ("device", "dtype", "fast", "compile", "shard", "backend", "communication",
                  "overlap", "balance", "drop_slow", "workers"),
    "Run directory and checkpoints": (
        "run_dir", "resume", "checkpoint_every", "keep", "checkpoint_copies", "when_full",
        "log_every", "watch", "watch_devices", "check_every",
    ),
    "Trackers": ("track", "track_project", "track_each_node"),
}  # fmt: skip
COMMON_FIELDS = frozenset({
    "preset", "model", "method", "objective", "weights", "data", "data_dir", "test_data", "target",
    "freeze", "augment", "image_size", "tokenizer", "epochs", "global_batch", "lr", "schedule",
    "optimizer", "patience", "seed", "device", "dtype", "run_dir", "resume", "checkpoint_every",
    "track",
})  # fmt: skip


def sections_of(target: str) -> list[Section]:
    """Returns the help sections with all options of the class ``MODULE:CLASS``."""
    module, name = target.split(":")
    return option_sections(getattr(importlib.import_module(module), name), show_all=True)


def option_sections(kind: type, show_all: bool) -> list[Section]:
    """Returns the help sections of a class; one section when it has few grouped options."""
    rows = {
        option.name: option.row()
        for option in list_options(kind)
        if option.flag and (show_all or option.name in COMMON_FIELDS)
    }
    grouped = {title: [rows.pop(n) for n in names if n in rows] for title, names in GROUPS.items()}
    if sum(map(len, grouped.values())) < 4:
        return [("Options", [*rows.values(), *itertools.chain(*grouped.values())])]
    return [("Model and data", list(rows.values())), *grouped.items()]


def render_help(kind: type, prog: str, show_all: bool) -> str:
    """Renders the help page of a class of options."""
    sections = option_sections(kind, show_all)
    num_shown = sum(len(rows) for _, rows in sections)
    num_hidden = len([option for option in list_options(kind) if option.flag]) - num_shown
    notes = [f"{num_hidden} more options: {prog} --help-all"] if num_hidden else []
    if prog.startswith("paceline train"):
        notes.append("Options for hosts, processes and the run: paceline train --help")
    width = shutil.get_terminal_size((WIDTH, 24)).columns
    return render(f"{prog} [OPTIONS]", kind.__doc__ or "", sections, notes, width)


@functools.cache
def _class_sources(module: str) -> dict[str, ast.ClassDef]:
    """Parses the classes of a module, by name."""
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


def _field_texts(kind: type) -> dict[str, str]:
    """Returns the docstring below each field of a class."""
    tree = _class_sources(kind.__module__)[kind.__name__]
    texts = {}
    for field, following in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = ast.literal_eval(following.value) if isinstance(following, ast.Expr) else ""
            texts[field.target.id] = " ".join(text.split())
    return texts


def _option(field: dataclasses.Field[Any], hint: Any, text: str) -> Option:
    flag = "--" + field.name.replace("_", "-")
    if hint in (bool, bool | None):
        default = {"True": "on", "False": "off"}.get(str(field.default), "")
        return Option(f"{flag} / --no-{flag[2:]}", "", default, text, field.name)
    if typing.get_origin(hint) is Literal:
        kind, choices = "one of", tuple(filter(None, typing.get_args(hint)))
    else:
        kind, choices = _KINDS.get(hint, "words"), ()
    values = field.default if isinstance(field.default, tuple) else (field.default,)
    return Option(flag, kind, " ".join(map(str, values)), text, field.name, choices)


_KINDS: dict[Any, str] = {str: "text", int: "whole number", float: "number"}


def markdown(kind: type) -> str:
    """Renders a table of all options of a class."""
    rows = ["| option | default | |", "|---|---|---|"]
    for option in list_options(kind):
        default = f"`{option.default}`" if option.default else ""
        text = option.text
        if option.choices:
            text += f" One of: {', '.join(option.choices)}."
        rows.append(f"| `{option.flag}` | {default} | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(rows) + "\n"
