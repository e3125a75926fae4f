"""The job of a built-in recipe: its options, its data files, and what hosts need of them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from paceline.cli import trust
from paceline.cli.dispatch import Dispatch
from paceline.cli.job_options import build_job
from paceline.cli.options import settings_registry
from paceline.cli.settings import toml_of
from paceline.cli.variables import RUN_TABLE, variable_of
from paceline.cli.verb import NAMED_PATHS
from paceline.launch.planning.entry import COMPILER
from paceline.recipes import RECIPES, explicit_options, parse_options, recipe
from paceline.recipes.argv import (
    as_flags,
    check_known,
    option_names,
    parse_values,
    split_option,
    to_argv,
)
from paceline.recipes.catalogue import catalogue
from paceline.recipes.data import is_hub_id, is_path
from paceline.recipes.effect import has_effect
from paceline.recipes.options import Options, parse_micro_batch
from paceline.recipes.pretrained_list import IMAGENET, TORCHVISION_PREFIX
from paceline.rundir import named_paths as recorded_paths
from paceline.rundir import records
from paceline.spec.errors import SettingError
from paceline.spec.formatting import closest_match, shell_text
from paceline.spec.hosts import Cluster
from paceline.spec.job import Data, Entry, Input, Job
from paceline.spec.rundir import CHECKPOINTS, CONFIG, SELECTORS, checkpoints
from paceline.spec.settings import TOML_NAME
from paceline.spec.training.balance import parse_weights, validate_limits, validate_weights
from paceline.spec.training.used_weights import model_paths

GATHERED_PREFIX = "paceline-data-"  # begins the name of a folder that goes with this command
DATA_FILES = ("data", "test_data", "target", "chat_template")
"""Options of recipes that may name a file."""
PER_HOST_PARSERS: dict[str, Callable[[str], object]] = {
    "balance": parse_weights,
    "micro_batch": parse_micro_batch,
}
"""Options that may have a number for each host, and what understands them."""
RECIPE_MODULES = ("torch", "paceline.train")


def require_recipe_first(option: str, following: Sequence[str], verb: str) -> None:
    """Raises SettingError for an option of a recipe before the recipe's name."""
    if not option.startswith("-"):
        return
    remaining = [option, *following]
    recipe = next((argument for argument in following if argument in RECIPES), "RECIPE")
    if recipe in remaining:
        remaining.remove(recipe)
    raise SettingError(
        f"{option} precedes the name of the recipe",
        found="it is not an option of this command; options of a recipe follow its name",
        remedy=shell_text(["paceline", verb, recipe, *remaining]),
    )


def check_host_names(options: Options, job: Job, cluster: Cluster, dispatch: Dispatch) -> None:
    """Raises SettingError for options about hosts that the job does not have."""
    weights, limits = parse_weights(options.balance), parse_micro_batch(options.micro_batch)
    names_hosts = isinstance(weights, Mapping) or isinstance(limits, Mapping)
    if not names_hosts or dispatch.kind != "run" or not dispatch.scheduler.accepts_hosts:
        return
    from paceline.launch.planning.planner import choose_hosts

    names = [host.name for host in choose_hosts(job, cluster)]
    if isinstance(weights, Mapping):
        validate_weights(weights, names)
    if isinstance(limits, Mapping):
        validate_limits(limits, names)


def check_same_recipe(name: str, run_dir: Path) -> None:
    """Raises SettingError if the folder has checkpoints of another recipe, and leaves it as it is.

    Ranks refuse other differences, of which a launcher does not know.
    """
    config = records.read_object(run_dir / CONFIG) if checkpoints(run_dir) else None
    if config is not None and config.get("recipe", name) != name:
        raise SettingError(
            f"{run_dir} is a run of another recipe",
            found=f"{config['recipe']} then, {name} now",
            remedy="a --run-dir of its own for this one, or --resume never",
        )


def check_data_exists(
    ctx: click.Context, options: Options, cluster: Cluster, dispatch: Dispatch
) -> None:
    """Raises SettingError for missing data, unless other hosts may have the path."""
    is_remote = has_remote_host(cluster)
    is_here = dispatch.kind == "run" and dispatch.scheduler.is_direct and not ctx.params["image"]
    if not is_here or options.data_dir:
        return
    for field in ("data", "test_data", "target"):
        data = getattr(options, field, "")
        path, flag = Path(data).expanduser(), f"--{field.replace('_', '-')}"
        is_name = not data or (field == "data" and (not is_path(data) or is_hub_id(data)))
        if is_name or path.exists() or (is_remote and path.is_absolute()):
            continue
        names = list[str]()
        with suppress(OSError):
            names = [entry.name for entry in path.parent.iterdir()]
        match = closest_match(path.name, names)
        remedy = [f"Did you mean {flag} {path.parent / match}?"] if match else []
        remedy += ["If only the hosts have it, give its absolute path"] if is_remote else []
        raise SettingError(
            f"{flag} {data}: no such file or folder",
            found=f"no {path.absolute()}",
            remedy="\n".join(remedy),
        )


def parse_recipe_options(ctx: click.Context, name: str, argv: Sequence[str]) -> Options:
    """Parses a recipe's options from arguments and paceline.toml; raises as parse_options.

    A batch may run where no such file is, so what counts of it joins the words that are typed.
    """
    common = ["--backend", ctx.params["backend"]] if ctx.params["backend"] else []
    toml = toml_of(ctx)
    typed_names = explicit_options(name, argv)
    from_run, variables = settings_of_run(ctx, name, toml)
    own = toml.get("train", {}).get(name, {})
    table = {key: value for key, value in {**from_run, **own}.items() if key not in variables}
    flags = [*table_to_flags(name, table), *table_to_flags(name, variables)]
    options = parse_options(name, [*common, *argv], flags)

    def effective(values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in values.items() if (field := key.replace("-", "_"))
                not in typed_names and has_effect(field, options)}  # fmt: skip

    path, file_values = Path.cwd() / TOML_NAME, effective(table)
    for key in file_values.keys() - own.keys():
        trust.require_trust(path, toml, key)
    own_values = {key: value for key, value in file_values.items() if key in own}
    trust.require_trust_of_recipe(path, toml, name, own_values)
    parameter = "options" if "options" in ctx.params else "args"
    all_values = {**file_values, **effective(variables)}
    ctx.params[parameter] = (*table_to_flags(name, all_values), *argv)
    return options


def settings_of_run(
    ctx: click.Context, name: str, toml: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the values of a recipe's options that are options of ``paceline run``, too.

    They are those of ``[run]`` in paceline.toml, and those of ``PACELINE_OPT_…`` variables.
    """
    from_run, variables = dict[str, Any](), dict[str, Any]()
    for key in option_names(recipe(name).options):
        option = settings_registry().get(key)
        if option is None or key.replace("-", "_") in ctx.params:
            continue
        if key in (table := toml.get(RUN_TABLE, {})):
            from_run[key] = table[key]
        if value := os.environ.get(variable_of(option)):
            variables[key] = value
    return from_run, variables


@contextmanager
def prepared_job(
    ctx: click.Context, name: str, options: Options, cluster: Cluster
) -> Iterator[Job]:
    """Yields the job that trains with a recipe, with all files of this machine that hosts need.

    Raises:
        SettingError: Files that would be sent are named only by the run of --like.
    """
    ctx.meta[NAMED_PATHS] = named_paths(ctx, name, options, cluster)
    files = {field: getattr(options, field, "") for field in DATA_FILES}
    portable = {field: absolute_folder(path) for field, path in files.items() if path}
    sent = sent_paths(name, options)
    portable |= {field: path for field, (path, _) in sent.items()}
    inputs = tuple(itertools.chain(*(needed for _, needed in sent.values())))
    options = dataclasses.replace(options, **dict[str, Any](portable))
    sends_files = has_effect("data_dir", options) and not options.data_dir
    with gather_files(list(files.values()) if sends_files else []) as folder:
        if folder:
            absolute = {field: absolute_file(path) for field, path in files.items() if path}
            options = dataclasses.replace(options, **dict[str, Any](absolute))
        job = add_data_folder(recipe_job(ctx, name, options), folder)
        inputs = () if job.ship.value == "never" else inputs
        yield dataclasses.replace(
            job, data=data_folder(options.data), inputs=(*job.inputs, *inputs)
        )


def absolute_file(path: str) -> str:
    """Returns the absolute path of an existing file; anything else unchanged."""
    file = Path(path).expanduser().absolute()
    return str(file) if file.is_file() else path


def absolute_folder(path: str) -> str:
    """Returns the absolute path of an existing folder: ranks have another working folder.

    Names of data sets stay names.
    """
    folder = existing_path(path)
    return folder if folder and Path(folder).is_dir() else path


def existing_path(name: str) -> str:
    """Returns the absolute path of an existing file or folder; empty for names of data sets."""
    path = Path(name).expanduser().absolute()
    is_data_set = any(entry.name == name for entry in catalogue() if entry.kind == "data")
    return str(path) if name and not is_data_set and path.exists() else ""


def data_folder(data: str) -> Data | None:
    """Returns the folder that is named as data; hosts that lack it get a copy."""
    folder = absolute_folder(data) if data else ""
    aliases = {} if data == folder else {data: ""}  # its own path is known to recipes
    return Data(folder, aliases) if folder and Path(folder).is_dir() else None


def sent_paths(name: str, options: Options) -> dict[str, tuple[str, tuple[Input, ...]]]:
    """Returns the absolute paths of models, runs and checkpoints, and the inputs for hosts.

    Names of other things stay as they are.
    """
    sent = {"resume": resume_input(options.resume)}
    if weights := getattr(options, "weights", ""):
        sent["weights"] = weights_input(weights)
    if not is_builtin_model(name, options.model):
        sent["model"] = path_input(options.model)
    return sent


def is_builtin_model(name: str, model: str) -> bool:
    """Returns whether a recipe has a model of this name, which is then no folder."""
    own = {entry.name for entry in catalogue() if (entry.kind, entry.recipe) == ("models", name)}
    return model in own or model.startswith(TORCHVISION_PREFIX)


def resume_input(selector: str) -> tuple[str, tuple[Input, ...]]:
    """Returns the absolute path of a run or checkpoint to resume from, and the inputs for it.

    Any other selector stays as it is.
    """
    path = Path(selector).expanduser().absolute()
    if selector in SELECTORS or selector.isdecimal() or not path.is_dir():
        return selector, ()
    newest = [f"{CHECKPOINTS}/{checkpoint.name}" for checkpoint in checkpoints(path)[:1]]
    parts = tuple(dict.fromkeys((*model_paths(path), *newest))) if newest else ()
    return str(path), (Input(str(path), parts),)


def weights_input(weights: str) -> tuple[str, tuple[Input, ...]]:
    """Returns the absolute path of a run or weights file, and the inputs that hosts need for it."""
    path = Path(weights).expanduser().absolute()
    if weights == IMAGENET:
        return weights, ()
    if weights and path.is_dir():
        return str(path), (Input(str(path), model_paths(path)),)
    return path_input(weights)


def path_input(name: str) -> tuple[str, tuple[Input, ...]]:
    """Returns the absolute path of an existing file or folder, and the input hosts need for it.

    Any other name stays as it is.
    """
    path = Path(name).expanduser().absolute()
    if path.is_file():
        return str(path), (Input(str(path.parent), (path.name,), named=True),)
    if name and path.is_dir():
        return str(path), (Input(str(path), named=True),)
    return name, ()


def named_paths(
    ctx: click.Context, name: str, options: Options, cluster: Cluster
) -> frozenset[str]:
    """Returns the paths of this machine that the command, or an earlier one of --like, names.

    Raises:
        SettingError: Files that would be sent are named only by the run of --like.
    """
    argv = ctx.params["options" if "options" in ctx.params else "args"]
    values = {field: getattr(options, field, "") for field in DATA_FILES}
    values |= {field: path for field, (path, inputs) in sent_paths(name, options).items() if inputs}
    paths = {field: path for field, value in values.items() if (path := existing_path(value))}
    like, _ = split_option("--like", argv)
    if like is None:
        return frozenset(paths.values())
    run = Path(like) if Path(like).is_dir() else Path(like).parent
    typed = {path for field, path in paths.items() if field in explicit_options(name, argv)}
    named = recorded_paths.read(run) | typed
    if has_remote_host(cluster):
        for field, path in paths.items():
            if path not in typed:
                option = shell_text([f"--{field.replace('_', '-')}", path])
                recorded_paths.require_named(run, path, f"If the hosts may have it: {option}")
    return named.intersection(paths.values())


def has_remote_host(cluster: Cluster) -> bool:
    """Whether files of this machine would leave it."""
    return not all(host.local for host in cluster.hosts)


@contextmanager
def gather_files(names: Sequence[str]) -> Iterator[str]:
    """Yields a folder with links to the existing files among these names; "" if there are none.

    The folder is an input of the job: it travels to hosts, where the links are files. Recipes look
    there for the file names of their data first.
    """
    paths = [Path(name).expanduser().absolute() for name in names if name]
    files = [path for path in dict.fromkeys(paths) if path.is_file()]
    have_unique_names = len({path.name for path in files}) == len(files)
    if not files or not have_unique_names:  # two files of one name cannot lie in one folder
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix=GATHERED_PREFIX) as folder:
        for path in files:
            (Path(folder) / path.name).symlink_to(path)
        yield folder


def add_data_folder(job: Job, folder: str) -> Job:
    """Returns the job with a folder of data files, which is sent to other hosts."""
    if not folder:
        return job
    entry = dataclasses.replace(job.entry, args=(*job.entry.args, "--data-dir", folder))
    return dataclasses.replace(job, entry=entry, inputs=(*job.inputs, Input(folder, named=True)))


def _check_list(options_class: type, context: str, key: str, values: Sequence[Any]) -> None:
    """Raises SettingError for a list that would be read as more than the values of its option."""
    defaults = {field.name: field.default for field in dataclasses.fields(options_class)}
    if not isinstance(defaults[key.replace("-", "_")], tuple):
        raise SettingError(f"{context} {key}: one value is expected", found=f"a list: {values}")
    if options := [value for value in values if str(value).startswith("-")]:
        raise SettingError(
            f"{context} {key}: {options[0]} cannot be a value", found="a dash at its start"
        )


def table_to_flags(name: str, table: Mapping[str, Any]) -> list[str]:
    """Converts ``[train.NAME]`` of paceline.toml into flags; SettingError if it has an error."""
    options_class, context = recipe(name).options, f"paceline.toml [train.{name}]"
    names, flags_by_key = option_names(options_class), dict[str, list[str]]()
    for key, value in table.items():
        flag = key.replace("_", "-")
        check_known(context, flag, names)
        if isinstance(value, dict) and key.replace("-", "_") in PER_HOST_PARSERS:
            for host, number in value.items():
                if isinstance(number, dict):  # TOML takes n1.cluster = 3 for a table n1
                    raise SettingError(
                        f"{context} {key}: {host} has no number",
                        found="in TOML, a name with dots needs quotes",
                        remedy=f'"{host}.{next(iter(number), "DOMAIN")}" = 3',
                    )
            value = ",".join(f"{host}={number}" for host, number in value.items())
        elif isinstance(value, list):
            _check_list(options_class, context, key, value)
        flags_by_key[key] = as_flags(f"--{flag}", value)
    flags = [word for values in flags_by_key.values() for word in values]
    try:
        check_values(options_class, flags, context)
    except SettingError:
        for key, values in flags_by_key.items():  # which it is
            try:
                check_values(options_class, values, context)
            except SettingError as error:
                raise SettingError(
                    f"{context} {key} = {json.dumps(table[key], default=str)} is not valid",
                    found=error.message,
                    remedy=f"paceline train {name} --help-all lists all options with their values",
                ) from None
        raise
    return flags


def check_values(kind: type[Options], flags: Sequence[str], context: str) -> None:
    parsed = parse_values(kind, flags, context)
    for field, parse in PER_HOST_PARSERS.items():
        if field in parsed:
            parse(str(parsed[field]))


def recipe_job(ctx: click.Context, name: str, options: Options) -> Job:
    portable = dataclasses.replace(options, run_dir="")  # told by the launcher, node by node
    entry = Entry("module", recipe(name).module, tuple(to_argv(portable)))
    compiler = (COMPILER,) if options.compile or options.shard else ()
    job = build_job(ctx, entry, name=name, preload=(*RECIPE_MODULES, *compiler))
    return quiet_torch(job)


def quiet_torch(job: Job) -> Job:
    """Keeps torch's C++ warnings (failed reverse name look-ups, say) out of a recipe's output."""
    if "TORCH_CPP_LOG_LEVEL" in os.environ or "TORCH_CPP_LOG_LEVEL" in job.environment.variables():
        return job
    public = {**job.environment.public, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return dataclasses.replace(job, environment=dataclasses.replace(job.environment, public=public))
