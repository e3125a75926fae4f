"""``paceline check``: what would go wrong, before it does."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli import options
from paceline.cli.cluster import read_chosen_cluster
from paceline.cli.dispatch import ssh_options
from paceline.cli.settings import setting
from paceline.cli.verb import Verb, say
from paceline.remote import this_machine
from paceline.remote.openssh import SshOptions
from paceline.report import findings as report
from paceline.spec.finding import Finding
from paceline.spec.formatting import format_bit_rate
from paceline.spec.hosts import Host
from paceline.spec.job import Entry, Job, redact

if TYPE_CHECKING:
    from paceline.checks.check import Level, Survey


@click.command("check", cls=Verb)
@options.settings_options(
    options.HOSTS, options.SSH_CONFIG, options.ACCEPT_NEW_HOST_KEYS, options.NNODES,
    options.NPROC_PER_NODE, options.PYTHON, options.IFACE, options.MASTER_PORT, options.NO_TORCH,
)  # fmt: skip
@click.option(
    "--quick", is_flag=True, help="Do only the checks that take well under a second per host."
)
@click.option("--trial/--no-trial", default=True,
              help="At the end, import torch on all hosts and try collectives.")  # fmt: skip
@click.option(
    "--data", multiple=True, metavar="PATH", help="Path whose content must be equal on all hosts."
)
@click.option("--shared", multiple=True, metavar="PATH",
              help="Folder that must be the same one on all hosts.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--plain", is_flag=True, help="Print no colours and no live line, for logs.")
@click.option("--bundle", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Also write all findings to a .tar.gz for support;"
                   " what looks like a secret is left out.")  # fmt: skip
@click.pass_context
def command(ctx: click.Context, /, as_json: bool, plain: bool, bundle: Path | None,
            **_: object) -> None:  # fmt: skip
    """Find what would fail on these hosts, and show each node's settings.

    Exit status: 0 if nothing will fail (there may be warnings), 1 if something will fail, 2 if
    something could not be checked.
    """
    import asyncio

    from paceline.checks.preflight import requirements_of
    from paceline.checks.runner import evaluate, exit_status, survey_hosts

    level: Level = "quick" if ctx.params["quick"] else "full"
    hosts, job, ssh = check_subject(ctx)
    paths = {name: ctx.params[name] for name in ("data", "shared")}
    requirements = replace(requirements_of(job, hosts), **paths)
    with progress(quiet=as_json or plain) as show_progress:
        survey = asyncio.run(survey_hosts(hosts, ssh, requirements, level, show_progress))
        findings = evaluate(survey, level)
        if ctx.params["trial"] and needs_trial(survey, findings, level):
            from paceline.cli.measure.trial import run_trial

            show_progress("collectives")
            survey = survey.with_evidence("trial", run_trial(survey, job, ssh))
            findings = evaluate(survey, level)
    environment = environment_of(job, survey)
    record = {"findings": [finding.to_json() for finding in findings], "environment": environment}
    if bundle is not None:
        from paceline.report.bundle import write

        write(bundle, {"findings.json": record, "scene.json": survey.to_json()})
        say(f"paceline: wrote {bundle}", err=True)
    if as_json:
        click.echo(json.dumps(record, indent=2))
    else:
        show(survey, findings, environment, plain)
    ctx.exit(exit_status(findings))


def needs_trial(survey: Survey, findings: Sequence[Finding], level: Level) -> bool:
    """Returns whether a job could run at all; otherwise a trial would only fail, too."""
    if any(finding.outcome == "fail" for finding in findings):
        return False
    return level == "full" and survey.requirements.needs_torch and len(survey.names) > 1


def check_subject(ctx: click.Context) -> tuple[tuple[Host, ...], Job, SshOptions]:
    """Returns the hosts, a job that stands for those to come, and how to log in."""
    from paceline.launch.planning.planner import choose_hosts

    params, cluster = ctx.params, read_chosen_cluster(ctx)
    job = Job(
        name="check",
        entry=Entry("module", "paceline"),
        workdir=str(Path.cwd()),
        python=params["python"] or this_machine.default_python(),
        nnodes=setting(ctx, "nnodes"),
        nproc_per_node=setting(ctx, "nproc_per_node"),
        interface=setting(ctx, "iface"),
        master_port=setting(ctx, "master_port"),
        needs_torch=not params["no_torch"],
    )
    return choose_hosts(job, cluster), job, ssh_options(params)


def environment_of(job: Job, survey: Survey) -> dict[str, dict[str, str]]:
    """Returns the variables that ``run`` sets on each host, by the function that makes the plan."""
    from paceline.launch.planning import planner

    if not survey.networks or survey.refusals:  # a run would have other nodes
        return {}
    head = survey.networks[survey.names[0]].address
    environment = {}
    for host in survey.present:
        facts, network = survey.facts[host.name], survey.networks[host.name]
        processes = planner.processes_on(job, host, facts).value
        variables = planner.node_env(job, host, facts, processes, network)
        environment[host.name] = {
            name: redact(name, setting.value) for name, setting in variables.items()
        }
        environment[host.name] |= {"MASTER_ADDR": head, "PACELINE_ADDRESS": network.address}
        if job.master_port.value:
            environment[host.name]["MASTER_PORT"] = str(job.master_port.value)
    return environment


def show(survey: Survey, findings: Sequence[Finding], environment: Mapping[str, Mapping[str, str]],
         is_plain: bool) -> None:  # fmt: skip
    """Shows conclusion, remedies, hosts × checks, the matrix of pairs and the environment."""
    from paceline.checks.runner import conclusion

    text = report.lines(conclusion(findings), findings, include_passed=is_plain)
    names = [host.name for host in survey.hosts]
    tables = [report.grid(names, findings), *_rates(survey)]
    report.draw(text, tables, report.environment_lines(environment), sys.stdout, is_plain)


def _rates(survey: Survey) -> list[tuple[list[str], list[list[str]]]]:
    from paceline.checks.link import bits_per_s

    pairs = (survey.evidence.get("link") or {}).get("pairs", [])
    rates = {
        (pair["source"], pair["target"]):
            format_bit_rate(bits_per_s(pair)) if "bytes" in pair else "nothing"
        for pair in pairs
    }  # fmt: skip
    return [report.matrix(survey.names, rates)] if rates else []


@contextlib.contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Shows a live line on a terminal with what is being checked; yields its setter."""
    if quiet or not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("…") as status:
        yield status.update
