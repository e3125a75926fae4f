"""A forecast's measurements: a few steps on one host and on two, and the links between all."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from paceline.bench import step_model
from paceline.bench.step_model import Probe
from paceline.cli.dispatch import Dispatch, require_transport
from paceline.cli.measure.survey import survey
from paceline.cli.verb import say
from paceline.rundir.records import read_object
from paceline.spec import jobenv, rundir
from paceline.spec.errors import JobError
from paceline.spec.hosts import Cluster, Host
from paceline.spec.job import Job
from paceline.spec.settings import Setting, Source
from paceline.spec.training.balance import validate_weights


@dataclass(frozen=True)
class Prober:
    """Runs a few steps of a job on some hosts, and shows each note of a plan once."""

    ctx: click.Context
    job: Job
    cluster: Cluster
    dispatch: Dispatch
    package: bool
    shown_notes: set[str] = field(default_factory=set)

    def on(self, hosts: Sequence[Host], *, batches: Sequence[int] = (),
           parts: Sequence[float] = ()) -> Probe:  # fmt: skip
        """Runs a few steps on these hosts, in a folder that is removed; JobError if they fail."""
        from paceline.cli.measure.quiet_screen import PlanNotesScreen
        from paceline.cli.runs.run_end import report_failure
        from paceline.launch.launcher import run_job

        names = ", ".join(host.name for host in hosts)
        say(f"paceline: a few steps on {names}", err=True)
        request = {"batches": list(batches), "parts": list(parts),
                 "seconds": self.ctx.params["seconds"]}  # fmt: skip
        environment = self.job.environment
        variables = {**environment.public, jobenv.PROBE: json.dumps(request)}
        job = replace(
            self.job,
            environment=replace(environment, public=variables),
            is_measured=True,
            nnodes=Setting(len(hosts), Source.COMMAND_LINE),
        )
        with contextlib.ExitStack() as cleanup:
            folder = Path(tempfile.mkdtemp(prefix="paceline-forecast-"))
            cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
            transport = require_transport(self.ctx.params, "paceline forecast")
            screen = PlanNotesScreen(self.shown_notes)
            outcome = run_job(job, Cluster(tuple(hosts)), transport, screen,
                              run_dir=folder / "run", parent=folder,
                              package=self.package)  # fmt: skip
            if outcome.result.exit_code:
                cleanup.pop_all()  # it holds the logs that the report names
                raise JobError(
                    f"the few steps on {names} failed",
                    found=report_failure(outcome), exit_code=outcome.result.exit_code,
                )  # fmt: skip
            return read_probe(folder / "run" / rundir.MEASURED)


def read_probe(path: Path) -> Probe:
    """Reads the record of a probe; JobError if it is incomplete."""
    content = read_object(path)
    try:
        if content is not None:
            return Probe.read(content)
        problem = "it left no steps.json"
    except ValueError as error:
        problem = f"its steps.json is incomplete: {error}"
    raise JobError(
        "the program ended before its first steps were done",
        found=problem,
        remedy="forecast a command that trains: session.epochs, the loader's batches and"
        " session.step, at least 20 times",
    )


def measure(prober: Prober, max_hosts: int) -> step_model.StepModel:
    ctx, hosts = prober.ctx, prober.cluster.hosts
    weak = ctx.params["weak"]
    parts = [1.0, 0.5] if weak else [1.0, 0.5, 1 / max_hosts]
    link_rate = ctx.params["link"]
    # before anything that takes long: all have to be there
    rates, kinds = measure_links(prober) if link_rate is None else ({}, {})
    first = prober.on(hosts[:1], parts=parts)
    if isinstance(first.balance, Mapping):
        validate_weights(first.balance, [host.name for host in hosts])
    single, twins = {hosts[0].name: first}, dict[str, str]()
    own_batches = [timing.batch for timing in first.timings]
    for host in hosts[1:]:
        twin = next((name for name in single if kinds.get(name) == kinds.get(host.name)), None)
        if twin is None or ctx.params["each_host"]:
            single[host.name] = prober.on([host], batches=own_batches)
        else:
            twins[host.name] = twin
    pair = None
    if len(hosts) > 1 and link_rate is None:
        batch = max(own_batches)
        pair_batches = [2 * batch] if weak else [batch, max(2 * min(own_batches), 2)]
        pair = prober.on(hosts[:2], batches=pair_batches)
    is_assumed_equal = len(hosts) > 1 and hosts[1].name in twins
    if is_assumed_equal and pair is not None and (difference := pair.speed_difference) is not None:
        faster, slower, ratio = difference
        kind = ", of the same kind" if hosts[1].name in kinds else ""
        say(f"paceline: {slower} computes {ratio:.1f} times as long as {faster}{kind}:"
            " each host alone", err=True)  # fmt: skip
        single |= {host.name: prober.on([host], batches=own_batches)
                  for host in hosts if host.name in twins}  # fmt: skip
        twins.clear()
    return step_model.fit_model(single, pair, rates, twins, link_rate)


def measure_links(prober: Prober) -> tuple[dict[tuple[str, str], float], dict[str, str]]:
    """Bits a second between every two hosts, and what kind of machine each is, by SSH.

    Raises:
        ConnectError: Hosts cannot be reached; it names them.
    """
    hosts, ctx = prober.cluster.hosts, prober.ctx
    if len(hosts) < 2 or not prober.dispatch.scheduler.is_direct:
        return {}, {}
    from paceline.checks.link import bits_per_s
    from paceline.checks.runner import require_all_reachable

    say(f"paceline: the links between {len(hosts)} hosts", err=True)
    link_survey = survey(ctx, hosts, "full", only=("ports", "link"))
    reachable = [host.name for host in hosts if host.name not in link_survey.refusals]
    host_names = (ctx.params["hosts"] or "").split(",")  # not where a file or a lab describes them
    is_listed = reachable and set(reachable).issubset(host_names)
    hint = f"; without them: -H {','.join(reachable)}" if is_listed else "; or leave them out"
    require_all_reachable(link_survey, hint)
    pairs = (link_survey.evidence.get("link") or {}).get("pairs", [])
    rates = {(p["source"], p["target"]): bits_per_s(p) for p in pairs
             if "bytes" in p and p["seconds"] > 0}  # fmt: skip
    return rates, {name: machine_kind(facts) for name, facts in link_survey.facts.items()}


def machine_kind(facts: Mapping[str, Any]) -> str:
    """Returns what determines a host's speed, as far as its facts show it."""
    cpu, devices = facts.get("cpu") or {}, facts.get("devices") or {}
    cards = [gpu.get("name") or gpu.get("kind") for gpu in devices.get("gpus") or ()]
    cores = len(cpu.get("cores") or ())
    return json.dumps([cpu.get("model"), cores, cpu.get("quota"), cards])
