"""``paceline forecast``: how long a training would take on each number of hosts."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib.util
import itertools
import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from paceline.bench import forecast as model
from paceline.bench.forecast import Probe
from paceline.cli.flags import Number, Seconds
from paceline.cli.launch import FORECASTS, forecasts_near, job_of, launch_options, prepare
from paceline.cli.runs import find_run
from paceline.cli.train import options_of, refuse_names, refuse_options_first, training
from paceline.cli.verb import Verb, say
from paceline.cli.via import Via, submit, transport_of
from paceline.launch.entry import entry_of, opens_store, preload_of
from paceline.recipes import RECIPES
from paceline.recipes.argv import parse, to_argv
from paceline.remote import this_machine
from paceline.rundir.records import as_float, as_int, as_text, is_regular, read_object, read_records
from paceline.spec import communication, jobenv, rundir
from paceline.spec.balance import refuse_weights
from paceline.spec.errors import JobError, PacelineError, SettingError
from paceline.spec.figures import lasting
from paceline.spec.helptext import counted
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Entry, Job
from paceline.spec.nodes import bounds
from paceline.spec.settings import Setting, Source
from paceline.spec.terminal import clean, wrapped

MOST_FILES = 5000  # of a project that are looked at for the training library
SECONDS = 10.0


class Forecast(Verb):
    """Behind a recipe's name its options may stand among ours; a script's are its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Sees first whether a recipe is named."""
        named = next((word for word in args if word in RECIPES or word.endswith(".py")), "")
        if named in RECIPES and not {"-m", "--module"}.intersection(args):
            ctx.allow_interspersed_args = ctx.ignore_unknown_options = True
        return super().parse_args(ctx, args)


@click.command("forecast", cls=Forecast, context_settings={"allow_interspersed_args": False})
@launch_options
@click.option("-m", "--module", is_flag=True, help="WHAT is a Python module.")
@click.option("--up-to", type=click.IntRange(1, model.MOST_HOSTS), metavar="N",
              help="Forecast up to N hosts; those beyond the named ones are taken to be like the"
              f" last, and of more than {model.EACH} only some numbers are forecast. Default: the"
              " named ones.")  # fmt: skip
@click.option(
    "--weak",
    is_flag=True,
    help="The batch of each host is fixed, so the global batch grows with them.",
)
@click.option("--each-host", is_flag=True,
              help="Try every host alone, not one of each kind.")  # fmt: skip
@click.option("--seconds", type=Seconds(0.0), default=SECONDS, show_default=True, metavar="N",
              help="How long to do steps in each try; a round of them is finished.")  # fmt: skip
@click.option("--price", type=Number(0.0), metavar="MONEY",
              help="Of a host for an hour: also say what the training costs.")  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False, path_type=Path),
              help="Folder for forecast.json and forecast.svg.")  # fmt: skip
@click.option("--compare", metavar="RUN",
              help="Put what a run took beside its forecast instead.")  # fmt: skip
@click.argument("what", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, /, what: str | None, args: tuple[str, ...], module: bool,
            up_to: int | None, weak: bool, out: Path | None, compare: str | None,
            **_: object) -> None:  # fmt: skip
    """Say how long WHAT, a recipe or a script, would train on 1, 2, 3, … hosts.

    It does a few steps on one host and on two, in folders that are removed unless they fail, times
    an all-reduce between them and the links between all, and prints for each number of hosts what
    a step takes, what limits it and what would lift that. A script has to train with
    paceline.train.
    """
    if compare is not None:
        if what is not None:
            raise SettingError("--compare takes a run, and nothing else")
        show_comparison(ctx, find_run(compare))
        return
    if what is None:
        raise SettingError(
            "nothing to forecast", remedy="paceline forecast RECIPE or SCRIPT, with its arguments"
        )
    refuse_options_first(what, args, "forecast")
    cluster, via = prepare(ctx)
    if ctx.params["plan_only"] and via.kind != "submit":
        raise SettingError(
            "--plan does not apply to the few steps of paceline forecast",
            found="it prints one run, or the script of a batch",
            remedy=f"paceline {'train' if what in RECIPES else 'run'} --plan",
        )
    from paceline.launch.decide import choose_hosts
    from paceline.rundir.directory import fresh_path

    folder = out or fresh_path(Path(rundir.DEFAULT_PARENT), FORECASTS.rstrip("-"))
    with job_for(ctx, what, args, module, cluster, via) as (job, package):
        if via.kind == "submit":
            ctx.exit(submit(ctx, job, folder, via.scheduler, "--out"))
        hosts = choose_hosts(job, cluster)
        cluster = replace(cluster, hosts=hosts[: bounds(job.nnodes.value, len(hosts))[1]])
        with results_in(folder):
            most = up_to or len(cluster.hosts)
            known = look(Probing(ctx, job, cluster, via, package), most)
            found = model.forecast(known, model.sizes(most), weak=weak, price=ctx.params["price"])
            made = {"command": known_by(asdict(job.entry)), "made": time.time(),
                    "ranks": known.ranks, "asked": job.nproc_per_node.value, "weak": weak,
                    "conclusion": model.conclusion(found),
                    **model.to_json(found, known)}  # fmt: skip
            if ctx.params["as_json"]:
                click.echo(json.dumps(made, indent=2))
            else:
                say(wrapped(model.conclusion(found), 80) + "\n")
                say(model.table(found, known))
            with unwritable(folder):
                text = json.dumps(made, indent=2) + "\n"
                (folder / rundir.FORECAST).write_text(text, encoding="utf-8")
                (folder / "forecast.svg").write_text(model.picture(found), encoding="utf-8")
    if not ctx.params["as_json"]:
        say(f"\nnumbers {folder / rundir.FORECAST}\npicture {folder / 'forecast.svg'}")


@contextlib.contextmanager
def results_in(folder: Path) -> Iterator[None]:
    """A folder that is there before anything is measured, and goes again if nothing came.

    SettingError when it cannot be made.
    """
    before = folder.exists()
    with unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        if not before:
            with contextlib.suppress(OSError):  # it holds something
                folder.rmdir()


@contextlib.contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """An OSError in here as SettingError."""
    try:
        yield
    except OSError as error:
        raise SettingError(
            f"{folder} cannot hold the forecast", found=str(error), remedy="--out FOLDER"
        ) from None


# -- what is tried -------------------------------------------------------------------------


@contextlib.contextmanager
def job_for(ctx: click.Context, what: str, args: tuple[str, ...], module: bool,
            cluster: Cluster, via: Via) -> Iterator[tuple[Job, bool]]:  # fmt: skip
    """The job that is tried, and whether our own package goes with it.

    Raises:
        SettingError: It does not train with paceline.train, or not on these hosts.
    """
    if what in RECIPES and not module and not Path(what).is_file():
        options = options_of(ctx, what, args)
        if options.find_lr or options.find_batch:
            raise SettingError("--find-lr and --find-batch train nothing that could be forecast")
        communication.refuse_forecast(options.communication)
        if options.batch_per_process and not ctx.params["weak"]:
            raise SettingError(
                f"--batch-per-process {options.batch_per_process} has a larger global batch on more"
                " hosts, and this forecast would be of the same on all",
                remedy="--weak, or --global-batch in its place",
            )
        if options.drop_slow:
            say("paceline: --drop-slow is not forecast: every host has its share", err=True)
        with training(ctx, what, options) as job:
            refuse_names(options, job, cluster, via)
            yield job, True
        return
    if not module and not Path(what).exists():
        near = difflib.get_close_matches(what, RECIPES, 1)
        if near:
            raise SettingError(
                f"there is no recipe or script {what}", remedy=f"did you mean {near[0]}?"
            )
    entry = entry_of(what, args, module=module)
    refuse_without_steps(entry)
    yield job_of(ctx, entry, name=Path(what).stem, own_store=opens_store(entry),
                 preload=preload_of(entry)), False  # fmt: skip


def refuse_without_steps(entry: Entry) -> None:
    """SettingError for a program that cannot be told to end after a few steps."""
    looked = 0
    for path in itertools.islice(code_of(entry), MOST_FILES):
        looked += 1
        with contextlib.suppress(OSError):
            if path.is_file() and _IMPORTS.search(path.read_bytes()):
                return
    if looked == MOST_FILES:  # the rest may import it: the first steps will tell
        return
    raise SettingError(
        f"{entry.target} does not train with paceline.train, so nothing tells what a step is",
        found="it does not import paceline, nor does any file of its project that it imports",
        remedy="paceline bench scaling measures any script with a fixed number of steps;"
        " or use train.join, session.loader and session.step in it (docs/train.md)",
    )


_IMPORTS = re.compile(
    rb"^[ \t]*from[ \t]+paceline\b|^[^#\n]*\bimport(?:_module)?\b[^#\n]*\bpaceline\b", re.MULTILINE
)
_BY_NAME = re.compile(rb"\bimport_module\b|\b__import__\b|\bexec\(|\brunpy\b|\bentry_points\b")
"""So a program imports what its text does not name: every file of the project is looked at then."""


def reached_from(script: Path, root: Path) -> list[Path]:
    """A script and the files below a folder that it imports, and they; none where it is unread."""
    found: dict[Path, None] = {}
    left = [script]
    while left and len(found) < MOST_FILES:
        path = left.pop()
        if path not in found and (names := imported_by(path)) is not None:
            found[path] = None
            folders = path.parent, path.parent.parent, script.parent, root, root / "src"
            every = (folder / name.replace(".", "/") for name in names for folder in folders)
            files = (file for one in every for file in (one.with_name(f"{one.name}.py"),
                                                        one / "__init__.py"))  # fmt: skip
            left += filter(Path.is_file, files)
    return [*found]


def imported_by(path: Path) -> list[str] | None:
    """Names that a file's text imports, of modules or of what is in them; ``None``: unread."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names += [module, *(f"{module}.{one.name}".strip(".") for one in node.names)]
    return [name for name in names if name]


def code_of(entry: Entry) -> Iterator[Path]:
    """The program, and the Python files that belong to its code as it is sent to hosts."""
    from paceline.transfer.tree import files_of, folder_root, script_path

    here = Path.cwd()
    root = folder_root(here)
    if entry.kind == "module":
        spec = importlib.util.find_spec(entry.target.partition(".")[0])
        origin = Path((spec and spec.origin) or "nowhere")
        yield from origin.parent.rglob("*.py") if origin.name == "__init__.py" else [origin]
    else:
        script = script_path(entry, str(here))
        root = root if script.is_relative_to(root) else folder_root(script.parent)
        reached = reached_from(script, root)
        yield from reached
        if reached and not any(_BY_NAME.search(path.read_bytes()) for path in reached):
            return
    yield from (root / name for name in files_of(root) if name.endswith(".py"))


@dataclass(frozen=True)
class Probing:
    """What all tries have in common.

    Attributes:
        told: Notes of plans that were shown.
    """

    ctx: click.Context
    job: Job
    cluster: Cluster
    via: Via
    package: bool
    told: set[str] = field(default_factory=set)

    def on(self, hosts: Sequence[Host], *, batches: Sequence[int] = (),
           parts: Sequence[float] = ()) -> Probe:  # fmt: skip
        """A few steps there, in a folder that is removed unless they fail.

        Raises:
            JobError: They failed, or the program ended before them.
        """
        from paceline.cli.quiet_screen import Listening
        from paceline.launch.launcher import run_job
        from paceline.launch.summary import report_failure

        names = ", ".join(host.name for host in hosts)
        say(f"paceline: a few steps on {names}", err=True)
        asked = {"batches": list(batches), "parts": list(parts),
                 "seconds": self.ctx.params["seconds"]}  # fmt: skip
        environment = self.job.environment
        public = {**environment.public, jobenv.PROBE: json.dumps(asked)}
        shaped = replace(
            self.job,
            environment=replace(environment, public=public),
            nnodes=Setting(len(hosts), Source.COMMAND_LINE),
        )
        with contextlib.ExitStack() as leaving:
            folder = Path(tempfile.mkdtemp(prefix="paceline-forecast-"))
            leaving.callback(shutil.rmtree, folder, ignore_errors=True)
            transport = transport_of(self.ctx.params, "paceline forecast")
            outcome = run_job(shaped, Cluster(tuple(hosts)), transport, Listening(self.told),
                              run_dir=folder / "run", parent=folder,
                              package=self.package)  # fmt: skip
            if outcome.result.exit_code:
                leaving.pop_all()  # it holds the logs that the report names
                raise JobError(
                    f"the few steps on {names} failed",
                    found=report_failure(outcome), exit_code=outcome.result.exit_code,
                )  # fmt: skip
            return read_probe(folder / "run" / rundir.MEASURED)


def read_probe(path: Path) -> Probe:
    """What a few steps told. JobError where that is incomplete."""
    said = read_object(path)
    try:
        if said is not None:
            return Probe.read(said)
        why = "it left no steps.json"
    except ValueError as error:
        why = f"its steps.json is incomplete: {error}"
    raise JobError(
        "the program ended before its first steps were done",
        found=why,
        remedy="forecast a command that trains: session.epochs, the loader's batches and"
        " session.step, at least 20 times",
    )


def look(probing: Probing, most: int) -> model.Model:
    """All that is measured."""
    ctx, hosts = probing.ctx, probing.cluster.hosts
    weak = ctx.params["weak"]
    parts = [1.0, 0.5] if weak else [1.0, 0.5, 1 / most]
    rates, kinds = links(probing)  # before anything that takes long: all have to be there
    first = probing.on(hosts[:1], parts=parts)
    if isinstance(first.balance, Mapping):
        refuse_weights(first.balance, [host.name for host in hosts])
    alone, like = {hosts[0].name: first}, dict[str, str]()
    tried = [one.batch for one in first.timed]
    for host in hosts[1:]:
        same = next((name for name in alone if kinds.get(name) == kinds.get(host.name)), None)
        if same is None or ctx.params["each_host"]:
            alone[host.name] = probing.on([host], batches=tried)
        else:
            like[host.name] = same
    pair = None
    if len(hosts) > 1:
        own = max(tried)
        batches = [2 * own] if weak else [own, max(2 * min(tried), 2)]
        pair = probing.on(hosts[:2], batches=batches)
    taken_alike = len(hosts) > 1 and hosts[1].name in like
    if taken_alike and pair is not None and (differ := pair.unlike) is not None:
        quick, slow, times = differ
        kind = ", of the same kind" if hosts[1].name in kinds else ""
        say(f"paceline: {slow} computes {times:.1f} times as long as {quick}{kind}:"
            " each host alone", err=True)  # fmt: skip
        alone |= {host.name: probing.on([host], batches=tried)
                  for host in hosts if host.name in like}  # fmt: skip
        like.clear()
    return model.model(alone, pair, rates, like)


def links(probing: Probing) -> tuple[dict[tuple[str, str], float], dict[str, str]]:
    """Bits a second between every two hosts, and what kind of machine each is; where ssh leads.

    ConnectError names the hosts that cannot be reached.
    """
    hosts, ctx = probing.cluster.hosts, probing.ctx
    if len(hosts) < 2 or not probing.via.scheduler.is_direct:
        return {}, {}
    import asyncio

    from paceline.checks.check import Requirements
    from paceline.checks.link import bits_per_s
    from paceline.checks.runner import require_all_reachable, survey_hosts
    from paceline.remote.openssh import SshOptions

    say(f"paceline: the links between {len(hosts)} hosts", err=True)
    python = ctx.params["python"] or this_machine.default_python()
    requirements = Requirements(
        pythons={host.name: host.python or python for host in hosts},
        workdirs={host.name: host.workdir or str(Path.cwd()) for host in hosts},
        interface=ctx.params["iface"],
    )
    ssh = SshOptions(ctx.params["ssh_config"], ctx.params["accept_new_host_keys"])
    survey = asyncio.run(survey_hosts(hosts, ssh, requirements, "full", only=("ports", "link")))
    left = [host.name for host in hosts if host.name not in survey.refusals]
    typed = (ctx.params["hosts"] or "").split(",")  # not where a file or a lab describes them
    listed = left and set(left).issubset(typed)
    require_all_reachable(
        survey, f"; without them: -H {','.join(left)}" if listed else "; or leave them out"
    )
    pairs = (survey.evidence.get("link") or {}).get("pairs", [])
    rates = {(p["source"], p["target"]): bits_per_s(p) for p in pairs
             if "bytes" in p and p["seconds"] > 0}  # fmt: skip
    return rates, {name: kind_of(facts) for name, facts in survey.facts.items()}


def kind_of(facts: Mapping[str, Any]) -> str:
    """What makes a host's speed, as far as its facts tell it."""
    cpu, devices = facts.get("cpu") or {}, facts.get("devices") or {}
    cards = [one.get("name") or one.get("kind") for one in devices.get("gpus") or ()]
    cores = len(cpu.get("cores") or ())
    return json.dumps([cpu.get("model"), cores, cpu.get("quota"), cards])


# -- the fastest of the hosts ---------------------------------------------------------------


def fastest_of(job: Job, cluster: Cluster, run: Path) -> tuple[Cluster, str]:
    """Those hosts on which the newest forecast of a job's command found the training shortest.

    Args:
        job: What is to run.
        cluster: The hosts to choose from.
        run: The run directory that it will have: forecasts are looked for beside it.

    Returns:
        The chosen hosts, in their order, and a line that says why these.

    Raises:
        SettingError: There is no such forecast, or it leaves no choice among these hosts.
    """
    if job.nnodes.value is not None:
        raise SettingError(
            "--fastest chooses how many hosts are taken, and so does --nnodes",
            remedy="Leave out one of the two",
        )
    described = tuple(host.name for host in cluster.hosts)
    names = set(described)
    command, others = known_by(asdict(job.entry)), list[str]()
    folders, files = forecasts_near(run)
    for path in sorted(filter(is_regular, files), key=_changed, reverse=True):
        try:
            told = Told.read(path)
        except SettingError as error:
            others += [error.message]
            continue
        if told.command != command:
            continue
        asked = job.nproc_per_node.value
        here = [
            one for one in told.forecasts if not one["declined"] and names.issuperset(one["names"])
        ]
        if told.weak:
            others += [f"{path}: it is of --weak: a larger batch on more hosts"]
        elif asked not in (told.asked, told.ranks):
            others += [f"{path}: it is of {counted(told.ranks, 'rank')} on each host"]
        elif missing := sorted(names - told.hosts):
            others += [f"{path}: nothing is known there of {', '.join(missing)}"]
        elif here:
            best = min(here, key=lambda one: as_float(one.get("total")) or one["seconds"])
            hosts = tuple(host for host in cluster.hosts if host.name in best["names"])
            many = f"{len(hosts)} of {counted(len(names), 'host')}"
            why = f"fastest by {path}: {', '.join(host.name for host in hosts)} ({many}):"
            chosen = replace(cluster, hosts=hosts, among=described)
            return chosen, f"{why} {lasting(best['seconds'])} a step"
    looked = f"looked at {len(files)} in {', '.join(map(str, sorted(folders)))}"
    raise SettingError(
        "--fastest needs a forecast of this command on these hosts",
        found="\n".join([looked, *others]),
        remedy="paceline forecast, with the same words, hosts and -p, in the same folder",
    )


# -- what came -----------------------------------------------------------------------------


def show_comparison(ctx: click.Context, run: Path) -> None:
    """A run beside its forecast: said, and kept in the run directory."""
    try:
        found = compare_and_keep(run)
    except OSError as error:
        raise SettingError(
            f"{run}: the comparison cannot be kept there", found=str(error)
        ) from None
    if ctx.params["as_json"]:
        click.echo(json.dumps(found, indent=2))
    else:
        say(wrapped(said_of(found), 80))


def after_run(run: Path) -> str:
    """The same at the end of a run; empty where its command was not forecast."""
    with contextlib.suppress(PacelineError, OSError, ValueError):
        return wrapped(f"paceline: {said_of(compare_and_keep(run))}", 80)
    return ""


def compare_and_keep(run: Path) -> dict[str, Any]:
    """What was forecast and what came, written beside the run; raises as :func:`comparison`."""
    found = comparison(run)
    (run / rundir.FORECAST).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return found


def comparison(run: Path) -> dict[str, Any]:
    """What was forecast for a run's command, hosts and ranks, and what came.

    Raises:
        SettingError: There is no such forecast, or the run has too few records.
    """
    plan = read_object(run / rundir.PLAN) or {}
    command = known_by(plan.get("entry"))
    listed = plan.get("nodes")
    nodes = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    seconds = seconds_of(read_records(run / rundir.METRICS))
    if seconds is None:
        raise SettingError(
            f"{run} does not tell what a step took",
            found="it needs two records of the training in metrics.jsonl",
            remedy="a run of a recipe, or of a script that trains with paceline.train; with"
            " --log-every N records come more often",
        )
    folders, files = forecasts_near(run)
    others = []
    for path in sorted(filter(is_regular, files), key=_changed, reverse=True):
        try:
            one = Told.read(path).of(command, nodes)
        except SettingError as error:
            others += [error.message]
            continue
        if one is not None:
            return {"run": str(run), "forecast_by": str(path), "hosts": len(nodes),
                    "forecast": {name: one[name] for name in ("seconds", "low", "high", "limit")},
                    "came": {"seconds": seconds}}  # fmt: skip
    looked = f"looked at {len(files)} in {', '.join(map(str, sorted(folders)))}"
    raise SettingError(
        f"there is no forecast of the command of {run} on {counted(len(nodes), 'host')}",
        found="\n".join([looked, *others]),
        remedy="paceline forecast, with the same words, hosts and -p, in the same folder",
    )


def _changed(path: Path) -> float:
    """When a file was written; 0 of one that is gone."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


@dataclass(frozen=True)
class Told:
    """A forecast.json, as far as runs are put beside it.

    Attributes:
        path: The file.
        command: As of :func:`known_by`.
        weak: The batch of each host was fixed.
        ranks: On each host.
        asked: How ``-p`` named them, if it did.
        hosts: Names of those that there were.
        forecasts: One for each number of hosts.
    """

    path: Path
    command: list[str]
    weak: bool
    ranks: int
    asked: int | str | None
    hosts: frozenset[str]
    forecasts: tuple[dict[str, Any], ...]

    @classmethod
    def read(cls, path: Path) -> Told:
        """From the file, whatever stands in it. SettingError when that is no forecast."""
        said = read_object(path) or {}
        every, model_of, ranks = said.get("forecasts"), said.get("model"), as_int(said.get("ranks"))
        alone = model_of.get("alone") if isinstance(model_of, dict) else None
        typed, weak = said.get("command"), said.get("weak")
        if (not isinstance(every, list) or not all(map(_is_forecast, every)) or not ranks
                or not isinstance(alone, dict) or not isinstance(weak, bool)
                or not isinstance(typed, list) or not typed[1:]):  # fmt: skip
            raise SettingError(
                f"{path} is no forecast", found="it is incomplete or damaged", remedy="Remove it"
            )
        entry = {"kind": typed[0], "target": typed[1], "args": typed[2:]}
        asked = said.get("asked")
        asked = asked if isinstance(asked, int | str) else None
        return cls(path, known_by(entry), weak, ranks, asked, frozenset(alone), tuple(every))

    def of(self, command: Sequence[str],
           nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:  # fmt: skip
        """The forecast of a command on these nodes of a plan; ``None`` for another command.

        SettingError when it was forecast for something else than these nodes.
        """
        if list(command) != self.command:
            return None
        one = next((one for one in self.forecasts if one["hosts"] == len(nodes)), None)
        names = {as_text(node.get("host")) for node in nodes}
        ranks = {len(node["ranks"]) if isinstance(node.get("ranks"), list) else 0 for node in nodes}
        if self.weak:
            why = "it is of --weak: a larger batch on more hosts"
        elif one is None:
            why = "it is of other numbers of hosts: --up-to goes further"
        elif one["declined"]:
            why = f"nothing was forecast: {one['declined']}"
        elif ranks != {self.ranks}:
            why = f"it is of {counted(self.ranks, 'rank')} on each host"
        elif others := sorted(self.hosts.intersection(one["names"]) - names):
            why = f"it is of other hosts: {', '.join(others)}"
        else:
            return one
        raise SettingError(f"{self.path}: {why}")


def _is_forecast(one: object) -> bool:
    """Whether something is the forecast of a number of hosts, with all that we look at."""
    if not isinstance(one, dict) or not as_int(one.get("hosts")):
        return False
    texts = isinstance(one.get("declined"), str) and isinstance(one.get("limit"), str)
    names = one.get("names")
    listed = isinstance(names, list) and all(isinstance(name, str) for name in names)
    times = all(as_float(one.get(name)) == one.get(name) for name in ("seconds", "low", "high"))
    return texts and listed and times and (one["seconds"] > 0 or one["declined"] != "")


def known_by(entry: object) -> list[str]:
    """A command by which a run is known again; empty when it is none.

    Of a recipe the options that change a step: ``train`` writes ``--data-dir`` itself, and how
    often something is recorded or kept is no other training.
    """
    said = entry if isinstance(entry, dict) else {}
    kind, target, args = said.get("kind"), said.get("target"), said.get("args")
    typed = [kind, target, *(args if isinstance(args, (list, tuple)) else ())]
    if not all(isinstance(word, str) for word in typed):
        return []
    recipe = next((one for one in RECIPES.values() if typed[:2] == ["module", one.module]), None)
    if recipe is None or any(word.startswith(("-h", "--help", "--like")) for word in typed[2:]):
        return typed
    with contextlib.suppress(SettingError):
        usual = {name: getattr(recipe.options(), name) for name in BESIDE_THE_STEPS}
        options = replace(parse(recipe.options, typed[2:], ""), **usual)
        return [*typed[:2], *to_argv(options)]
    return typed


BESIDE_THE_STEPS = ("data_dir", "log_every", "checkpoint_every", "keep", "checkpoint_copies")


def seconds_of(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds of a step, by the records of a training; its first one holds the start, too."""
    trained = [one for one in records if one.get("split") == "train"]
    steps = seconds = 0.0
    for before, one in itertools.pairwise(trained):
        more = as_float(one.get("step")) - as_float(before.get("step"))
        samples, speed = as_float(one.get("samples")), as_float(one.get("samples_per_s"))
        if more > 0 and samples > 0 and speed > 0:
            steps += more
            seconds += samples / speed
    return seconds / steps if steps else None


def said_of(found: Mapping[str, Any]) -> str:
    """One line."""
    told, came = found["forecast"], found["came"]["seconds"]
    off = came / told["seconds"] - 1
    longer = f"{abs(off):.0%} {'longer' if off > 0 else 'shorter'}"
    inside = told["low"] <= came <= told["high"]
    return (
        f"a step was forecast to take {lasting(told['seconds'])}"
        f" ({lasting(told['low'])} … {lasting(told['high'])}, limited by"
        f" {clean(told['limit'])}), and took {lasting(came)}: {longer},"
        f" {'inside' if inside else 'outside'} the error bar"
    )
