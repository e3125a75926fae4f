"""The job that the common options describe."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import click

from paceline.cli import trust
from paceline.cli.cluster import hosts_setting
from paceline.cli.settings import setting, toml_of
from paceline.spec import jobenv
from paceline.spec.errors import SettingError
from paceline.spec.formatting import shell_text
from paceline.spec.job import Entry, Environment, Job, mask_assignments
from paceline.spec.settings import TOML_NAME, Setting, Source

_SETTINGS = {  # field of the job: option
    **{name: name for name in ("nproc_per_node", "nnodes", "master_port", "ship", "bind", "debug",
                               "encrypt", "max_restarts")},
    **{f"{name}_s": name for name in ("wait_for_nodes", "lease", "grace", "hang_timeout",
                                      "restart_window")},
    "interface": "iface",
}  # fmt: skip


def build_job(ctx: click.Context, entry: Entry, name: str, **fields: Any) -> Job:
    """Builds the job that the options describe; ``fields`` are those that only this verb sets."""
    from paceline.remote import this_machine

    if ctx.params["notify"]:
        from paceline.launch import notify

        notify.check(ctx.params["notify"])
    if setting(ctx, "run_dir").source is Source.FILE:
        trust.require_trust(Path.cwd() / TOML_NAME, toml_of(ctx), "run-dir")
    public, forwarded = parse_env(ctx.params["env"])
    for hidden in ctx.params["unset"]:
        reject_reserved("--unset", hidden)
    environment = Environment(public, forwarded, ctx.params["unset"], setting(ctx, "env").source)
    settings: dict[str, Any] = {f: setting(ctx, option) for f, option in _SETTINGS.items()}
    return Job(
        name=ctx.params["name"] or name,
        entry=entry,
        workdir=str(Path.cwd()),
        python=ctx.params["python"] or this_machine.default_python(image=ctx.params["image"]),
        environment=environment,
        activate=activation_scripts(ctx),
        hosts=hosts_setting(ctx),
        backend=ctx.params["backend"],
        follow_links=ctx.params["follow_links"],
        notify=ctx.params["notify"],
        report=ctx.params["report"],
        typed=command_text(environment),
        **settings,
        **fields,
    )


def command_text(environment: Environment) -> str:
    from paceline.rundir.directory import Redactor

    command = shell_text(["paceline", *mask_assignments(sys.argv[1:])])
    return Redactor(environment.secrets()).text(command)


def activation_scripts(ctx: click.Context) -> Setting[tuple[str, ...]]:
    """Returns the scripts with paths that are valid on every host; ``~`` is each host's own."""
    scripts = setting(ctx, "activate")
    for script in scripts.value:
        if not script or not script.replace("\t", " ").isprintable():
            raise SettingError(
                f"--activate {script!r} is not a file name", remedy="--activate FILE"
            )
    paths = tuple(
        script if script.startswith("~") else str(Path.cwd() / script) for script in scripts.value
    )
    return Setting(paths, scripts.source, scripts.detail)


def reject_reserved(flag: str, name: str) -> None:
    """Raises SettingError for a variable that the plan sets and would overwrite."""
    if jobenv.is_reserved(name):
        raise SettingError(
            f"{flag} {name}: that variable says a rank's place, which paceline decides",
            remedy="Leave it out; --master-port, --nnodes and --nproc-per-node change the plan",
        )


def parse_env(assignments: tuple[str, ...]) -> tuple[dict[str, str], dict[str, str]]:
    """Parses ``--env``: ``NAME=VALUE`` pairs, and names whose values are forwarded."""
    public: dict[str, str] = {}
    forwarded: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not re.fullmatch(r"\S+", name) or "\0" in assignment:
            raise SettingError(f"--env {assignment!r} names no variable", remedy="--env NAME=VALUE")
        reject_reserved("--env", name)
        if equals:
            public[name] = value
        elif name in os.environ:
            forwarded[name] = os.environ[name]
        else:
            raise SettingError(
                f"--env {name}: there is no variable {name} to forward",
                remedy=f"export {name}=…, or --env {name}=VALUE",
            )
    return public, forwarded
