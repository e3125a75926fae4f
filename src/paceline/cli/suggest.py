"""What may stand at a place of a command line: hosts, runs, labs, recipes and their options.

Only what lies at hand is looked at: files of this folder and of the user, and the labs of this
machine. What cannot be read suggests nothing.
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

from paceline.cli.help import options_of
from paceline.cli.verb import Verb
from paceline.spec.errors import PacelineError

if TYPE_CHECKING:
    from paceline.recipes.reference import Option

MOST_RUNS = 100  # the newest
HOST_FILES = ("hostfile", "hosts", "hosts.txt", "hostlist", "machinefile", "machines", "nodes")
Item = CompletionItem[str]
Named = Iterable[tuple[str, str]]  # values, each with what is said beside it


def suggestions(program: click.Command, name: str, args: list[str], incomplete: str) -> list[Item]:
    """What may stand next.

    Args:
        program: The whole command.
        name: Its name.
        args: The words before.
        incomplete: What stands of the next one.
    """
    args = list(args)
    ctx = _resolve_context(program, {}, name, args)
    if _is_a_script_s(ctx):
        return [Item(incomplete, type="file")]
    place, typed = _resolve_incomplete(ctx, args, incomplete)
    if isinstance(place, click.Option) and args:  # without its value click reads no arguments
        ctx = _resolve_context(program, {}, name, args[:-1])
    recipe = _recipe_of(ctx)
    if recipe is not None and (found := _of_recipe(recipe, ctx, args, typed)) is not None:
        return found
    if incomplete.startswith("--") and "=" in incomplete and not isinstance(place, click.Option):
        return []  # of an option that nobody knows
    if isinstance(place, click.Parameter):
        return _values(ctx, place, typed)
    items = place.shell_complete(ctx, typed)
    if typed.startswith("-"):
        known = {flag for o in options_of(ctx.command, ctx.command.get_params(ctx))
                 for flag in (*o.opts, *o.secondary_opts)}  # fmt: skip
        items = [item for item in items if item.value in known]
        if recipe is not None:
            taken = {item.value for item in items}
            items += [Item(flag, help=option.text) for option in _options(recipe)
                      for flag in option.flag.split(" / ")
                      if flag.startswith(typed) and flag not in taken]  # fmt: skip
    return items


def _is_a_script_s(ctx: click.Context) -> bool:
    """Whether the words are no more ours: they follow a script, or a command."""
    if ctx.allow_interspersed_args or isinstance(ctx.command, click.Group):
        return False
    arguments = [param for param in ctx.command.params if isinstance(param, click.Argument)]
    first = arguments[0] if arguments else None
    given = ctx.params.get(first.name or "") if first else None
    return bool(given) and (first is not None and first.nargs == 1) and first.name == "script"


def _values(ctx: click.Context, param: click.Parameter, typed: str) -> list[Item]:
    """Of an option, or in the place of an argument."""
    verb = ctx.command.name or ""
    find = VALUES.get(f"{verb} {param.name}") or VALUES.get(param.name or "")
    if find is None:
        return param.shell_complete(ctx, typed)
    items: list[Item] = []
    for one in find(ctx, typed):
        if isinstance(one, CompletionItem):
            items.append(one)
        elif one[0].startswith(typed):
            items.append(Item(one[0], help=one[1]))
    return items


# --- recipes, whose options are no parameters of click's


def _recipe_of(ctx: click.Context) -> type | None:
    """The options' class of the recipe, or of what uses its models."""
    if isinstance(ctx.command, Verb) and ctx.command.options_of:
        module, name = ctx.command.options_of.split(":")
        found: type = getattr(importlib.import_module(module), name)
        return found
    if ctx.command.name not in ("train", "forecast", "scaling"):
        return None
    from paceline.recipes import RECIPES

    named = next((word for word in _passed_on(ctx) if word in RECIPES), "")
    return RECIPES[named].options if named else None


def _passed_on(ctx: click.Context) -> list[str]:
    """The words that are no options of ours."""
    words: list[str] = []
    for param in ctx.command.params:
        if isinstance(param, click.Argument):
            value = ctx.params.get(param.name or "")
            words += map(str, value) if isinstance(value, tuple) else [str(value)] if value else []
    return words


def _options(recipe: type) -> list[Option]:
    from paceline.recipes.reference import list_options

    return [option for option in list_options(recipe) if option.flag]


def _of_recipe(recipe: type, ctx: click.Context, args: list[str], typed: str) -> list[Item] | None:
    """Values of the option before the cursor; ``None`` where none of the recipe's is meant."""
    last = next((word for word in reversed(args) if word.startswith("-")), "")
    ours = {flag for param in ctx.command.params for flag in param.opts}
    option = next((o for o in _options(recipe) if o.flag == last), None)
    if typed.startswith("-") or option is None or last in ours:
        return None
    if option.kind != "words" and args[-1] != last:
        return None
    name = option.name
    if option.choices:
        return [Item(one) for one in option.choices if one.startswith(typed)]
    if name in ("data", "test_data", "target", "data_dir", "weights", "run_dir", "resume"):
        return [*_catalogue(recipe, name, typed), Item(typed, type="file")]
    return _catalogue(recipe, name, typed)


def _catalogue(recipe: type, field: str, typed: str) -> list[Item]:
    """Names that an option of a recipe takes."""
    from paceline.recipes import RECIPES
    from paceline.recipes.catalogue import catalogue
    from paceline.recipes.options import TRACKERS
    from paceline.spec.communication import WAYS

    kinds = {"data": "data", "model": "models", "augment": "augmentations", "preset": "presets"}
    own = next((one.name for one in RECIPES.values() if one.options is recipe), "")
    found = [(one.name, one.summary) for one in catalogue()
             if one.kind == kinds.get(field) and one.recipe == own]  # fmt: skip
    words: Mapping[str, Iterable[str]] = {
        "track": TRACKERS, "communication": WAYS, "balance": ("even", "auto"),
        "resume": ("auto", "never", "latest", "best"), "checkpoint_copies": ("auto",),
    }  # fmt: skip
    found += [(word, "") for word in words.get(field, ())]
    if field == "weights":
        found += _runs("runs/")
    return [Item(name, help=said) for name, said in found if name.startswith(typed)]


# --- hosts


def _hosts(ctx: click.Context, typed: str) -> Iterator[tuple[str, str] | Item]:
    """Whatever ``-H`` takes; in a list the next one."""
    before, comma, _ = typed.rpartition(",")
    taken = before.split(",")
    if not comma:
        yield from _sources()
        yield Item(typed, type="file")
    seen: set[str] = set()
    for name, where in _known_hosts():
        if name not in taken and name not in seen:
            seen.add(name)
            yield f"{before}{comma}{name}", where


def _one_host(ctx: click.Context, typed: str) -> Named:
    return _known_hosts()


def _sources() -> Iterator[tuple[str, str]]:
    from paceline.hosts.dialect import Reading
    from paceline.hosts.dialects import ALLOCATIONS, DIALECTS

    yield "local", "this machine"
    for name, said in _labs():
        yield ("lab", "the virtual cluster that is up") if name == "default" else (
            f"lab:{name}", said)  # fmt: skip
    reading = Reading(environ=os.environ)
    for name in ALLOCATIONS:
        with contextlib.suppress(PacelineError):
            if DIALECTS[name].detect(reading):
                yield name, "the allocation that this is in"


def _known_hosts() -> Iterator[tuple[str, str]]:
    """Names of hosts in paceline.toml, in host files that lie here, and in ssh's configuration."""
    from paceline.hosts import load_toml

    toml: Mapping[str, Any] = {}
    with contextlib.suppress(PacelineError):
        toml = load_toml(Path("paceline.toml"))
    yield from ((name, "paceline.toml") for name in toml.get("hosts", {}))
    usual = toml.get("run", {}).get("hosts")
    files = dict.fromkeys([usual, *HOST_FILES] if isinstance(usual, str) else HOST_FILES)
    ssh = "ssh-config:~/.ssh/config"
    for source in (*files, ssh):
        path = Path(source.removeprefix("ssh-config:")).expanduser()
        if path.is_file() or (source == usual and not path.exists()):
            yield from ((name, source) for name in _hosts_of(source))


def _hosts_of(source: str) -> list[str]:
    from paceline.hosts import read_hosts

    with contextlib.suppress(PacelineError, OSError):
        found = read_hosts(source, environ=os.environ, cwd=Path.cwd())
        return [host.name for host in found.hosts]
    return []


def _labs() -> list[tuple[str, str]]:
    from paceline.hosts.lab import is_running, list_labs

    with contextlib.suppress(PacelineError, OSError):
        return [(one.root.name, "a lab that is up") for one in list_labs() if is_running(one)]
    return []


def _lab_hosts(ctx: click.Context, typed: str) -> Iterator[tuple[str, str]]:
    from paceline.hosts.lab import find_lab

    with contextlib.suppress(PacelineError):
        layout = find_lab(ctx.params.get("name") or "", os.environ)
        yield from ((name, "") for name in _hosts_of(str(layout.hostfile)))


def _faults(ctx: click.Context, typed: str) -> Named:
    faults = sys.modules["paceline.cli.lab"].FAULTS  # the verb's own module, in use by now
    return [(one.name, f"HOST {one.usage}: {one.summary}".replace(" :", ":"))
            for one in faults.values()]  # fmt: skip


# --- runs


def _runs(parent: str = "") -> list[tuple[str, str]]:
    """The newest runs below runs/, with how each stands."""
    from paceline.rundir import records
    from paceline.rundir.ownership import owner_alive, read_owner
    from paceline.spec import rundir

    found = []
    for path in records.folders_in(Path(rundir.DEFAULT_PARENT)):
        with contextlib.suppress(OSError):
            over = records.is_regular(path / rundir.RESULT)
            if over or records.is_regular(path / rundir.EVENTS):
                owner = None if over else read_owner(path)
                state = "over" if over else "running" if owner and owner_alive(owner) else ""
                found.append((path.lstat().st_mtime, f"{parent}{path.name}", state))
    found.sort(reverse=True)
    return [(name, state) for _, name, state in found[:MOST_RUNS]]


def _run_names(ctx: click.Context, typed: str) -> Iterator[tuple[str, str] | Item]:
    yield from _runs("runs/" if "/" in typed else "")
    if "/" in typed:
        yield Item(typed, type="dir")


def _run_folders(ctx: click.Context, typed: str) -> Iterator[tuple[str, str] | Item]:
    yield from _runs("runs/")
    yield Item(typed, type="dir")


def _hosts_of_run(ctx: click.Context, typed: str) -> Iterator[tuple[str, str]]:
    """Those that have logs in the run that is named, or in the newest."""
    from paceline.rundir import records
    from paceline.spec import rundir

    parent = Path(rundir.DEFAULT_PARENT)
    named = ctx.params.get("run") or next((name for name, _ in _runs()), "")
    for path in (Path(named), parent / named):
        yield from ((folder.name, "") for folder in records.folders_in(path / rundir.LOGS))


# --- the rest


def _recipes(ctx: click.Context, typed: str) -> Named:
    from paceline.recipes import RECIPES

    return [(one.name, one.summary) for one in RECIPES.values()]


def _recipes_and_files(ctx: click.Context, typed: str) -> Iterator[tuple[str, str] | Item]:
    if ctx.command.name != "scaling" or ctx.params.get("recipe"):
        yield from _recipes(ctx, typed)
    yield Item(typed, type="file")


def _dialects(ctx: click.Context, typed: str) -> Named:
    from paceline.hosts.dialects import DIALECTS

    return [(name, one.title) for name, one in DIALECTS.items()]


def _variables(ctx: click.Context, typed: str) -> Named:
    return [(name, "") for name in sorted(os.environ) if not name.startswith("COMP_")]


def _interfaces(ctx: click.Context, typed: str) -> Named:
    with contextlib.suppress(OSError):
        return [(path.name, "") for path in sorted(Path("/sys/class/net").iterdir())]
    return []


def _labs_up(ctx: click.Context, typed: str) -> Named:
    return _labs()


def _files(ctx: click.Context, typed: str) -> list[Item]:
    return [Item(typed, type="file")]


def _processes(ctx: click.Context, typed: str) -> Named:
    return [("auto", "one a GPU, else one a CPU"), ("gpu", "one a GPU"), ("cpu", "one a CPU")]


# what stands there by the parameter's name, with the verb's before it where only there
VALUES: dict[str, Callable[[click.Context, str], Iterable[tuple[str, str] | Item]]] = {
    "hosts": _hosts,
    "up hosts": lambda *_: (),  # a number
    "source": _hosts,
    "supervisor": _one_host,
    "run": _run_folders,
    "runs": _run_names,
    **{f"{verb} run": _run_names for verb in ("status", "logs", "stop", "explain", "attach")},
    "compare": _run_folders,
    "logs host": _hosts_of_run,
    **{f"{verb} host": _lab_hosts for verb in ("shell", "exec", "fault", "heal")},
    **{f"{verb} name": _labs_up for verb in ("up", "down", "status", "shell", "exec", "fault",
                                             "heal")},
    "fault kind": _faults,
    **{f"{verb} name": _recipes for verb in ("show", "copy", "options")},
    "train chosen": _recipes,
    "what": _recipes_and_files,
    "script": _recipes_and_files,
    "run script": _files,
    "dialect": _dialects,
    "hosts target": _dialects,
    "env": _variables,
    "unset": _variables,
    "iface": _interfaces,
    "nproc_per_node": _processes,
    **dict.fromkeys(("args", "words", "python", "activate", "mpiexec", "notify", "command_words",
                     "setup_command"), _files),
}  # fmt: skip
