"""What may stand at a place of a command line: hosts, runs, labs, recipes and their options.

Only local files and the labs of this machine are looked at. What cannot be read suggests nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem, _resolve_context, _resolve_incomplete

from paceline.cli.help import applicable_options
from paceline.cli.verb import Verb
from paceline.spec.errors import PacelineError
from paceline.spec.rundir import SELECTORS

if TYPE_CHECKING:
    from paceline.recipes.reference import Option


MAX_RUNS = 100  # the newest
HOST_FILES = ("hostfile", "hosts", "hosts.txt", "hostlist", "machinefile", "machines", "nodes")
Item = CompletionItem[str]
Described = Iterable[tuple[str, str]]  # values, each with what is said beside it


def suggestions(program: click.Command, name: str, args: list[str], incomplete: str) -> list[Item]:
    """Returns the possible next words after ``args``; ``incomplete`` is the start of the next."""
    args = list(args)
    ctx = _resolve_context(program, {}, name, args)
    if _belongs_to_script(ctx):
        return [Item(incomplete, type="file")]
    place, typed = _resolve_incomplete(ctx, args, incomplete)
    if isinstance(place, click.Option) and args:  # without its value click reads no arguments
        ctx = _resolve_context(program, {}, name, args[:-1])
    recipe = _recipe_of(ctx)
    if recipe is not None and (values := _of_recipe(recipe, ctx, args, typed)) is not None:
        return values
    if incomplete.startswith("--") and "=" in incomplete and not isinstance(place, click.Option):
        return []  # of an option that nobody knows
    if isinstance(place, click.Parameter):
        return _values(ctx, place, typed)
    items = place.shell_complete(ctx, typed)
    if typed.startswith("-"):
        flags = {flag for o in applicable_options(ctx.command, ctx.command.get_params(ctx))
                 for flag in (*o.opts, *o.secondary_opts)}  # fmt: skip
        items = [item for item in items if item.value in flags]
        if recipe is not None:
            suggested = {item.value for item in items}
            items += [Item(flag, help=option.text) for option in _options(recipe)
                      for flag in option.flag.split(" / ")
                      if flag.startswith(typed) and flag not in suggested]  # fmt: skip
    return items


def _belongs_to_script(ctx: click.Context) -> bool:
    """Returns whether the words belong to a script or a command, not to Paceline."""
    if ctx.allow_interspersed_args or isinstance(ctx.command, click.Group):
        return False
    arguments = [param.name for param in ctx.command.params if isinstance(param, click.Argument)]
    return arguments[:1] == ["script"] and bool(ctx.params.get("script"))


def _values(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Item]:
    verb = ctx.command.name or ""
    provider = VALUES.get(f"{verb} {param.name}") or VALUES.get(param.name or "")
    if provider is None:
        return param.shell_complete(ctx, incomplete)
    items: list[Item] = []
    for suggestion in provider(ctx, incomplete):
        if isinstance(suggestion, CompletionItem):
            items.append(suggestion)
        elif suggestion[0].startswith(incomplete):
            items.append(Item(suggestion[0], help=suggestion[1]))
    return items


def _recipe_of(ctx: click.Context) -> type | None:
    """Returns the options class of the recipe, or of the command that uses its models."""
    if isinstance(ctx.command, Verb) and ctx.command.options_of:
        module, name = ctx.command.options_of.split(":")
        options_class: type = getattr(importlib.import_module(module), name)
        return options_class
    if ctx.command.name not in ("train", "forecast", "scaling"):
        return None
    from paceline.recipes import RECIPES

    recipe_name = next((word for word in _typed_arguments(ctx) if word in RECIPES), "")
    return RECIPES[recipe_name].options if recipe_name else None


def _typed_arguments(ctx: click.Context) -> list[str]:
    """Returns the words of the line to be completed that are no options of Paceline's."""
    arguments: list[str] = []
    for param in ctx.command.params:
        if isinstance(param, click.Argument) and (value := ctx.params.get(param.name or "")):
            arguments += map(str, value if isinstance(value, tuple) else [value])
    return arguments


def _options(recipe: type) -> list[Option]:
    from paceline.recipes.reference import list_options

    return [option for option in list_options(recipe) if option.flag]


def _of_recipe(
    recipe: type, ctx: click.Context, args: list[str], incomplete: str
) -> list[Item] | None:
    """Values of the option before the cursor; ``None`` where none of the recipe's is meant."""
    last_flag = next((word for word in reversed(args) if word.startswith("-")), "")
    own_flags = {flag for param in ctx.command.params for flag in param.opts}
    option = next((o for o in _options(recipe) if o.flag == last_flag), None)
    if incomplete.startswith("-") or option is None or last_flag in own_flags:
        return None
    if option.kind != "words" and args[-1] != last_flag:
        return None
    name = option.name
    if option.choices:
        return [Item(choice) for choice in option.choices if choice.startswith(incomplete)]
    if name in ("data", "test_data", "target", "data_dir", "weights", "run_dir", "resume"):
        return [*_catalogue(recipe, name, incomplete), Item(incomplete, type="file")]
    return _catalogue(recipe, name, incomplete)


def _catalogue(recipe: type, field: str, incomplete: str) -> list[Item]:
    from paceline.recipes import RECIPES
    from paceline.recipes.catalogue import catalogue
    from paceline.recipes.options import TRACKERS
    from paceline.spec.training.communication import METHODS

    kinds = {"data": "data", "model": "models", "augment": "augmentations", "preset": "presets"}
    recipe_name = next((entry.name for entry in RECIPES.values() if entry.options is recipe), "")
    names = [(entry.name, entry.summary) for entry in catalogue()
             if entry.kind == kinds.get(field) and entry.recipe == recipe_name]  # fmt: skip
    keywords: Mapping[str, Iterable[str]] = {
        "track": TRACKERS, "communication": METHODS, "balance": ("even", "auto"),
        "resume": SELECTORS, "checkpoint_copies": ("auto",),
    }  # fmt: skip
    names += [(keyword, "") for keyword in keywords.get(field, ())]
    if field == "weights":
        names += _runs("runs/")
    return [
        Item(name, help=description) for name, description in names if name.startswith(incomplete)
    ]


def _hosts(ctx: click.Context, incomplete: str) -> Iterator[tuple[str, str] | Item]:
    """Returns values for ``-H``; within a list, for the next host."""
    prefix, comma, _ = incomplete.rpartition(",")
    listed = prefix.split(",")
    if not comma:
        yield from _sources()
        yield Item(incomplete, type="file")
    seen: set[str] = set()
    for name, origin in _configured_hosts():
        if name not in listed and name not in seen:
            seen.add(name)
            yield f"{prefix}{comma}{name}", origin


def _sources() -> Iterator[tuple[str, str]]:
    from paceline.hosts.dialect import Reading
    from paceline.hosts.dialects import ALLOCATIONS, DIALECTS

    yield "local", "this machine"
    for name, description in _labs():
        yield ("lab", "the virtual cluster that is up") if name == "default" else (
            f"lab:{name}", description)  # fmt: skip
    reading = Reading(environ=os.environ)
    for name in ALLOCATIONS:
        with contextlib.suppress(PacelineError):
            if DIALECTS[name].detect(reading):
                yield name, "the allocation that this is in"


def _configured_hosts() -> Iterator[tuple[str, str]]:
    """Names of hosts in paceline.toml, in host files that lie here, and in ssh's configuration."""
    from paceline.hosts import load_toml

    toml: Mapping[str, Any] = {}
    with contextlib.suppress(PacelineError):
        toml = load_toml(Path("paceline.toml"))
    yield from ((name, "paceline.toml") for name in toml.get("hosts", {}))
    default_source = toml.get("run", {}).get("hosts")
    files = dict.fromkeys(
        [default_source, *HOST_FILES] if isinstance(default_source, str) else HOST_FILES
    )
    ssh = "ssh-config:~/.ssh/config"
    for source in (*files, ssh):
        path = Path(source.removeprefix("ssh-config:")).expanduser()
        if path.is_file() or (source == default_source and not path.exists()):
            yield from ((name, source) for name in _hosts_of(source))


def _hosts_of(source: str) -> list[str]:
    from paceline.hosts import read_hosts

    with contextlib.suppress(PacelineError, OSError):
        cluster = read_hosts(source, environ=os.environ, cwd=Path.cwd())
        return [host.name for host in cluster.hosts]
    return []


def _labs() -> list[tuple[str, str]]:
    from paceline.hosts.lab import is_running, list_labs

    with contextlib.suppress(PacelineError, OSError):
        return [(lab.root.name, "a lab that is up") for lab in list_labs() if is_running(lab)]
    return []


def _lab_hosts(ctx: click.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    from paceline.hosts.lab import find_lab

    with contextlib.suppress(PacelineError):
        layout = find_lab(ctx.params.get("name") or "", os.environ)
        yield from ((name, "") for name in _hosts_of(str(layout.hostfile)))


def _faults(ctx: click.Context, incomplete: str) -> Described:
    faults = sys.modules["paceline.cli.verbs.lab"].FAULTS  # the verb's own module, in use by now
    return [(fault.name, f"HOST {fault.usage}: {fault.summary}".replace(" :", ":"))
            for fault in faults.values()]  # fmt: skip


def _runs(parent: str = "") -> list[tuple[str, str]]:
    from paceline.rundir import records
    from paceline.rundir.ownership import owner_alive, read_owner
    from paceline.spec import rundir

    runs = []
    for path in records.folders_in(Path(rundir.DEFAULT_PARENT)):
        with contextlib.suppress(OSError):
            is_over = records.is_regular(path / rundir.RESULT)
            if is_over or records.is_regular(path / rundir.EVENTS):
                owner = read_owner(path)
                state = "running" if owner and owner_alive(owner) else "over" if is_over else ""
                runs.append((path.lstat().st_mtime, f"{parent}{path.name}", state))
    runs.sort(reverse=True)
    return [(name, state) for _, name, state in runs[:MAX_RUNS]]


def _run_names(ctx: click.Context, incomplete: str) -> Iterator[tuple[str, str] | Item]:
    yield from _runs("runs/" if "/" in incomplete else "")
    if "/" in incomplete:
        yield Item(incomplete, type="dir")


def _run_folders(ctx: click.Context, incomplete: str) -> Iterator[tuple[str, str] | Item]:
    yield from _runs("runs/")
    yield Item(incomplete, type="dir")


def _hosts_of_run(ctx: click.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """Returns the hosts that have logs in the named run, or in the newest."""
    from paceline.rundir import records
    from paceline.spec import rundir

    parent = Path(rundir.DEFAULT_PARENT)
    run = ctx.params.get("run") or next((name for name, _ in _runs()), "")
    for path in (Path(run), parent / run):
        yield from ((folder.name, "") for folder in records.folders_in(path / rundir.LOGS))


def _recipes(ctx: click.Context, incomplete: str) -> Described:
    from paceline.recipes import RECIPES

    return [(recipe.name, recipe.summary) for recipe in RECIPES.values()]


def _recipes_and_files(ctx: click.Context, incomplete: str) -> Iterator[tuple[str, str] | Item]:
    if ctx.command.name != "scaling" or ctx.params.get("recipe"):
        yield from _recipes(ctx, incomplete)
    yield Item(incomplete, type="file")


def _dialects(ctx: click.Context, incomplete: str) -> Described:
    from paceline.hosts.dialects import DIALECTS

    return [(name, dialect.title) for name, dialect in DIALECTS.items()]


def _variables(ctx: click.Context, incomplete: str) -> Described:
    return [(name, "") for name in sorted(os.environ) if not name.startswith("COMP_")]


def _interfaces(ctx: click.Context, incomplete: str) -> Described:
    with contextlib.suppress(OSError):
        return [(path.name, "") for path in sorted(Path("/sys/class/net").iterdir())]
    return []


def _files(ctx: click.Context, incomplete: str) -> list[Item]:
    return [Item(incomplete, type="file")]


PROCESSES = [("auto", "one a GPU, else one a CPU"), ("gpu", "one a GPU"), ("cpu", "one a CPU")]
# what stands there by the parameter's name, with the verb's before it where only there
VALUES: dict[str, Callable[[click.Context, str], Iterable[tuple[str, str] | Item]]] = {
    "hosts": _hosts,
    "up hosts": lambda *_: (),  # a number
    "source": _hosts,
    "supervisor": lambda *_: _configured_hosts(),
    "run": _run_folders,
    "runs": _run_names,
    **{f"{verb} run": _run_names for verb in ("status", "logs", "stop", "explain", "attach")},
    "compare": _run_folders,
    "logs host": _hosts_of_run,
    **{f"{verb} host": _lab_hosts for verb in ("shell", "exec", "fault", "heal")},
    **{f"{verb} name": lambda *_: _labs()
       for verb in ("up", "down", "status", "shell", "exec", "fault", "heal")},
    "fault kind": _faults,
    **{f"{verb} name": _recipes for verb in ("show", "copy", "options")},
    "train chosen": _recipes,
    "what": _recipes_and_files,
    "script": _recipes_and_files,
    "run script": _files,
    "trust file": _files,
    "dialect": _dialects,
    "hosts target": _dialects,
    "env": _variables,
    "unset": _variables,
    "iface": _interfaces,
    "nproc_per_node": lambda *_: PROCESSES,
    **dict.fromkeys(("args", "words", "python", "activate", "mpiexec", "notify", "command_words",
                     "setup_command"), _files),
}  # fmt: skip
