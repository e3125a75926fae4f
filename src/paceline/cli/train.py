"""``paceline train``: a built-in recipe, here or on every host."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from paceline.cli.launch import job_of, launch, launch_options, prepare
from paceline.cli.sources import toml_of
from paceline.cli.verb import ALL, Verb, say
from paceline.cli.via import Via
from paceline.launch.entry import COMPILER
from paceline.recipes import RECIPES, explicit_options, parse_options, recipe
from paceline.recipes.argv import as_flags, check_known, option_names, parse_values, to_argv
from paceline.recipes.catalogue import catalogue
from paceline.recipes.effect import has_effect
from paceline.recipes.options import Options, parse_micro_batch
from paceline.spec.balance import refuse_limits, refuse_weights, weights_of
from paceline.spec.command import shell_text
from paceline.spec.errors import SettingError
from paceline.spec.helptext import Row, Section
from paceline.spec.hosts import Cluster
from paceline.spec.job import Data, Entry, Input, Job
from paceline.spec.rundir import used


class Train(Verb):
    """Names the recipes in its help."""

    def sections(self, ctx: click.Context) -> list[Section]:
        return [("Recipes", [Row(one.name, one.summary) for one in RECIPES.values()])]


@click.command(
    "train", cls=Train, context_settings={"ignore_unknown_options": True}, add_help_option=False
)
@launch_options
@click.option("-h", "--help", "wants_help", is_flag=True, help="Show this, or a recipe's options.")
@click.option("--help-all", is_flag=True, help="Show every option and exit.")
@click.argument("chosen", metavar="RECIPE", required=False)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, /, chosen: str | None, options: tuple[str, ...],
            wants_help: bool, help_all: bool, **_: object) -> None:  # fmt: skip
    """Train RECIPE; its own OPTIONS may stand among those below.

    `paceline train RECIPE --help` lists the recipe's options.
    """
    ctx.meta[ALL] = help_all
    if chosen is None:
        click.echo(ctx.get_help())
        ctx.exit(0 if wants_help or help_all else 2)
    if wants_help or help_all:
        parse_options(chosen, ["--help-all" if help_all else "--help"])
    refuse_options_first(chosen, options, "train")
    ctx.exit(train(ctx, chosen, options))


def refuse_options_first(what: str, others: Sequence[str], verb: str) -> None:
    """SettingError for an option of a recipe that stands before the recipe's name."""
    if not what.startswith("-"):
        return
    behind = [what, *others]
    named = next((word for word in others if word in RECIPES), "RECIPE")
    if named in behind:
        behind.remove(named)
    raise SettingError(
        f"{what} stands where a recipe is to be named",
        found="it is no option of this command, and those of a recipe stand behind its name",
        remedy=shell_text(["paceline", verb, named, *behind]),
    )


def train(ctx: click.Context, name: str, argv: tuple[str, ...]) -> int:
    """Checks the recipe's options here, then runs it on every host."""
    options = options_of(ctx, name, argv)
    cluster, via = prepare(ctx)
    with training(ctx, name, options) as job:
        refuse_names(options, job, cluster, via)
        return launch(ctx, job, cluster, via, package=True, after=_where)


def refuse_names(options: Options, job: Job, cluster: Cluster, via: Via) -> None:
    """SettingError for what is said of other hosts, before anything starts; the ranks look, too."""
    weights, limits = weights_of(options.balance), parse_micro_batch(options.micro_batch)
    of_hosts = isinstance(weights, Mapping) or isinstance(limits, Mapping)
    if not of_hosts or via.kind != "run" or not via.scheduler.accepts_hosts:
        return
    from paceline.launch.decide import choose_hosts

    names = [host.name for host in choose_hosts(job, cluster)]
    if isinstance(weights, Mapping):
        refuse_weights(weights, names)
    if isinstance(limits, Mapping):
        refuse_limits(limits, names)


def options_of(ctx: click.Context, name: str, argv: Sequence[str]) -> Options:
    """A recipe's options from what is typed and from paceline.toml; raises as parse_options.

    A batch may run where no such file is, so what counts of it joins the words that are typed.
    """
    shared = ["--backend", ctx.params["backend"]] if ctx.params["backend"] else []
    table = toml_of(ctx).get("train", {}).get(name, {})
    options = parse_options(name, [*shared, *argv], from_table(name, table))
    typed = explicit_options(name, argv)
    counts = {key: value for key, value in table.items() if (field := key.replace("-", "_"))
              not in typed and has_effect(field, options)}  # fmt: skip
    words = "options" if "options" in ctx.params else "args"
    ctx.params[words] = (*from_table(name, counts), *argv)
    return options


@contextmanager
def training(ctx: click.Context, name: str, options: Options) -> Iterator[Job]:
    """The job that trains with a recipe, with all that hosts need of this machine for it.

    It can be run as long as the context lasts: files of data lie in a folder that is removed then.
    """
    files = {field: getattr(options, field, "") for field in DATA_FILES}
    everywhere = {field: folder_everywhere(path) for field, path in files.items() if path}
    weights, inputs = weights_input(getattr(options, "weights", ""))
    everywhere |= {"weights": weights} if weights else {}
    options = dataclasses.replace(options, **dict[str, Any](everywhere))
    sends = has_effect("data_dir", options) and not options.data_dir
    with gathered(list(files.values()) if sends else []) as folder:
        if folder:
            found: dict[str, Any] = {field: absolute(path) for field, path in files.items() if path}
            options = dataclasses.replace(options, **found)
        job = with_data(recipe_job(ctx, name, options), folder)
        inputs = () if job.ship.value == "never" else inputs
        yield dataclasses.replace(
            job, data=data_folder(options.data), inputs=(*job.inputs, *inputs)
        )


GATHERED = "paceline-data-"  # begins the name of a folder that goes with this command
DATA_FILES = ("data", "test_data", "target")
"""Options of recipes that may name a file."""


def absolute(path: str) -> str:
    """A file as it is found from any folder; anything else as it is."""
    whole = Path(path).expanduser().absolute()
    return str(whole) if whole.is_file() else path


def folder_everywhere(path: str) -> str:
    """A folder that is here by its whole path: a rank has another working folder.

    Names of data sets stay names.
    """
    whole = Path(path).expanduser().absolute()
    named = any(one.name == path for one in catalogue() if one.kind == "data")
    return str(whole) if whole.is_dir() and not named else path


def data_folder(data: str) -> Data | None:
    """The folder that is named as data, which hosts get where they lack it."""
    folder = folder_everywhere(data) if data else ""
    words = () if data == folder else (data,)  # its own path is known to recipes
    return Data(folder, words) if folder and Path(folder).is_dir() else None


def weights_input(weights: str) -> tuple[str, tuple[Input, ...]]:
    """A run or a file of weights that is here by its whole path, and what hosts need of it."""
    path = Path(weights).expanduser().absolute()
    if path.is_file():
        return str(path), (Input(str(path.parent), (path.name,), named=True),)
    if weights and path.is_dir():
        return str(path), (Input(str(path), used(path)),)
    return weights, ()


@contextmanager
def gathered(names: Sequence[str]) -> Iterator[str]:
    """A folder with links to those names that are files here; empty text when none is.

    The folder is an input of the job: it travels to hosts, where the links are files. Recipes look
    there for the file names of their data first.
    """
    paths = [Path(name).expanduser().absolute() for name in names if name]
    found = [path for path in dict.fromkeys(paths) if path.is_file()]
    different = len({path.name for path in found}) == len(found)
    if not found or not different:  # two files of one name cannot lie in one folder
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix=GATHERED) as folder:
        for path in found:
            (Path(folder) / path.name).symlink_to(path)
        yield folder


def with_data(job: Job, folder: str) -> Job:
    """The job with a folder of data files, to be shipped to hosts that are not this one."""
    if not folder:
        return job
    entry = dataclasses.replace(job.entry, args=(*job.entry.args, "--data-dir", folder))
    return dataclasses.replace(job, entry=entry, inputs=(*job.inputs, Input(folder, named=True)))


OF_HOSTS: dict[str, Callable[[str], object]] = {
    "balance": weights_of,
    "micro_batch": parse_micro_batch,
}
"""Options that may have a number for each host, and what understands them."""


def from_table(name: str, table: Mapping[str, Any]) -> list[str]:
    """The flags that ``[train.NAME]`` of paceline.toml stands for.

    Raises:
        SettingError: A key is no option of the recipe, or its value none of the option.
    """
    kind, where = recipe(name).options, f"paceline.toml [train.{name}]"
    names, asked = option_names(kind), dict[str, list[str]]()
    for key, value in table.items():
        flag = key.replace("_", "-")
        check_known(where, flag, names)
        if isinstance(value, dict) and key.replace("-", "_") in OF_HOSTS:
            for host, one in value.items():
                if isinstance(one, dict):  # TOML takes n1.cluster = 3 for a table n1
                    raise SettingError(
                        f"{where} {key}: {host} is no host with a number",
                        found="in TOML a name with dots stands in quotes",
                        remedy=f'"{host}.{next(iter(one), "DOMAIN")}" = 3',
                    )
            value = ",".join(f"{host}={one}" for host, one in value.items())
        asked[key] = as_flags(f"--{flag}", value)
    flags = [word for words in asked.values() for word in words]
    try:
        refuse_values(kind, flags, where)
    except SettingError:
        for key, words in asked.items():  # which it is
            try:
                refuse_values(kind, words, where)
            except SettingError as error:
                raise SettingError(
                    f"{where} {key} = {json.dumps(table[key], default=str)} cannot be understood",
                    found=error.message,
                    remedy=f"paceline train {name} --help-all lists all options with their values",
                ) from None
        raise
    return flags


def refuse_values(kind: type[Options], flags: Sequence[str], where: str) -> None:
    """SettingError for a value that is none of its option."""
    said = parse_values(kind, flags, where)
    for field, understand in OF_HOSTS.items():
        if field in said:
            understand(str(said[field]))


def recipe_job(ctx: click.Context, name: str, options: Options) -> Job:
    """The job that runs a recipe with these options."""
    here = dataclasses.replace(options, run_dir="")  # told by the launcher, node by node
    entry = Entry("module", recipe(name).module, tuple(to_argv(here)))
    compiler = (COMPILER,) if options.compile or options.shard else ()
    job = job_of(ctx, entry, name=name, preload=(*RECIPE_MODULES, *compiler))
    return quiet_torch(job)


RECIPE_MODULES = ("torch", "paceline.train")


def quiet_torch(job: Job) -> Job:
    """Keeps torch's C++ warnings (failed reverse name look-ups, say) out of a recipe's output."""
    if "TORCH_CPP_LOG_LEVEL" in os.environ or "TORCH_CPP_LOG_LEVEL" in job.environment.all():
        return job
    public = {**job.environment.public, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return dataclasses.replace(job, environment=dataclasses.replace(job.environment, public=public))


def _where(path: Path) -> None:
    """Says where things are, once a training has ended well."""
    for label, name in (("model", "model"), ("metrics", "metrics.jsonl"), ("logs", "logs")):
        if (path / name).exists():
            say(f"{label:<8} {path / name}", err=True)
