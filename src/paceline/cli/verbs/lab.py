"""``paceline lab``: a virtual cluster on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import Any

import click

from paceline.cli.verb import Verb, VerbGroup, say
from paceline.lab import Lab, LabOptions
from paceline.lab.faults import FAULTS
from paceline.lab.lab import names_up, wait
from paceline.report.findings import aligned
from paceline.spec.errors import LabError
from paceline.spec.formatting import pluralize
from paceline.spec.helptext import Row, Section

_NAME = click.option(
    "--name", default="default", envvar="PACELINE_LAB", show_default=True, help="Name of the lab."
)
_PASS_THROUGH = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.group("lab", cls=VerbGroup)
def command() -> None:
    """Run a virtual cluster on this machine, to rehearse jobs and their failures.

    Every host has its own network, host name, processes, /etc/hosts, /tmp, /dev/shm and HOME, and a
    real sshd. The rest of the disk is this machine's. Hosts reach nothing outside the lab. When the
    lab is down, nothing of it remains.
    """


@command.command("up", cls=Verb)
@_NAME
@click.option("--hosts", default=2, show_default=True, help="Number of hosts: n1, n2, …")
@click.option("--foreground", is_flag=True,
              help="Stay in the foreground; Ctrl-C takes the lab down.")  # fmt: skip
@click.option("--rate", default="", metavar="RATE", help="Speed of every link, e.g. 100mbit.")
@click.option("--latency", default="", metavar="TIME", help="One-way delay, e.g. 10ms.")
@click.option("--subnet", default=LabOptions.subnet, show_default=True, help="The hosts' network.")
@click.option("--ipv6-only", is_flag=True, help="The hosts have no IPv4 addresses.")
@click.option(
    "--debian-hosts", is_flag=True, help="Map each host's own name to 127.0.1.1 in its /etc/hosts."
)
@click.option("--dead-interface", is_flag=True, help="Add a second interface that reaches nothing.")
@click.option("--dead-name", is_flag=True, help="Map each host's own name to the dead interface.")
@click.option("--bridge-address", is_flag=True, help="Add docker0 with 172.17.0.1 on every host.")
@click.option("--interface-names", metavar="NAMES",
              help="Names of interfaces, used in turn, e.g. eth0,ens3,enp1s0.")  # fmt: skip
@click.option(
    "--python", "pythons", multiple=True, metavar="HOST=VENV", help="Use another Python on a host."
)
@click.option("--no-sshd", multiple=True, metavar="HOST", help="Start no sshd on a host.")
@click.option("--private", multiple=True, metavar="PATH[:SIZE]",
              help="Give each host its own folder at this path.")  # fmt: skip
@click.option(
    "--hide", multiple=True, metavar="PATH", help="Show an empty folder at this path on every host."
)
@click.option("--shared-home", is_flag=True, help="Use one HOME for all hosts.")
@click.option("--share", multiple=True, metavar="PATH",
              help="Share a folder of this machine below /tmp or /run.")  # fmt: skip
def up(
    foreground: bool, interface_names: str | None, pythons: tuple[str, ...], **options: Any
) -> None:
    """Start a lab."""
    if interface_names is not None:
        options["interface_names"] = tuple(interface_names.split(","))
    lab = Lab(LabOptions(python=dict(map(_host_and_venv, pythons)), **options))
    if foreground:
        _run_foreground(lab)
    else:
        _start(lab, detached=True)


def _host_and_venv(text: str) -> tuple[str, str]:
    host, equals, path = text.partition("=")
    if not (host and equals and path):
        raise LabError(f"--python {text!r} is not HOST=VENV", remedy="--python n2=/path/to/venv")
    return host, path


def _start(lab: Lab, detached: bool) -> None:
    """Brings the lab up and says how to use it."""
    start = time.monotonic()
    lab.up(detached=detached)
    seconds = time.monotonic() - start
    addresses = [f"{name} {lab.address(name)}" for name in lab.names]
    hosts = ", ".join(addresses if len(addresses) <= 8 else [*addresses[:3], "…", addresses[-1]])
    count = pluralize(len(addresses), "host")
    say(f"lab {lab.name!r}: {count} up in {seconds:.1f} s: {hosts}")
    say(f"  host file   {lab.hostfile}")
    say(f"  ssh config  {lab.ssh_config}")
    if lab.settings:
        say(f"  settings    {lab.settings}")
    option = "" if lab.name == "default" else f" --name {lab.name}"
    say("try:")
    say(f"  paceline lab shell{option} {lab.names[0]}")
    say(f"  ssh -F {lab.ssh_config} {lab.names[0]}")
    say(f"  paceline run -H lab{'' if lab.name == 'default' else f':{lab.name}'} SCRIPT")
    say(f"  paceline lab down{option}")


def _run_foreground(lab: Lab) -> None:
    """Keeps the lab up until Ctrl-C, SIGTERM, a closed terminal or its own end."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        _start(lab, detached=False)
        wait(lab)
    except KeyboardInterrupt:
        say("taking the lab down")
    finally:
        lab.down()


@command.command("down", cls=Verb)
@_NAME
@click.option("--all", "everything", is_flag=True, help="Take all your labs down.")
def down(name: str, everything: bool) -> None:
    """Take a lab down."""
    names = names_up() if everything else [lab_name for lab_name in names_up() if lab_name == name]
    for lab_name in names:
        Lab.attach(lab_name).down()
        say(f"lab {lab_name!r} is down")
    if not names:
        say("no lab is up" if everything else f"no lab called {name!r} is up")


@command.command("status", cls=Verb)
@click.option("--name", envvar="PACELINE_LAB", help="Show only this lab.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with a key per lab.")
def status(name: str | None, as_json: bool) -> None:
    """Show hosts, processes and faults of the labs that are up."""
    statuses = {name: _read_status(name)} if name else _read_statuses()
    if as_json:
        click.echo(json.dumps(statuses, indent=2))
        return
    for lab_name, lab in statuses.items():
        say(f"lab {lab_name!r}  (ssh config {lab['ssh_config']})")
        say("\n".join(_lines(lab)))
    if not statuses:
        say("no lab is up")


def _read_status(name: str) -> dict[str, Any]:
    lab = Lab.attach(name)
    files = {"ssh_config": str(lab.ssh_config), "hostfile": str(lab.hostfile)}
    return {**lab.status(), **files}


def _read_statuses() -> dict[str, dict[str, Any]]:
    statuses = {}
    for name in names_up():
        with contextlib.suppress(LabError):  # it went down just now
            statuses[name] = _read_status(name)
    return statuses


def _lines(lab: dict[str, Any]) -> list[str]:
    titles, rows = ("HOST", "ADDRESS", "INTERFACE", "PID", "SSHD", "FAULTS"), []
    for host in lab["hosts"]:
        faults = [fault for fault in lab["faults"] if fault["host"] == host["name"]]
        active = "; ".join(" ".join([fault["kind"], *fault["arguments"]]) for fault in faults)
        state = ("yes" if host["sshd"] else "no") if host["up"] else "off"
        pid = str(host["pid"] or "-")
        rows.append((host["name"], host["address"], host["interface"], pid, state, active or "-"))
    return [f"  {line}" for line in aligned(titles, rows)]


@command.command("shell", cls=Verb, context_settings=_PASS_THROUGH)
@_NAME
@click.argument("host")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND…]")
def shell(name: str, host: str, words: tuple[str, ...]) -> None:
    """Open a shell on HOST, or run COMMAND there like `exec`."""
    exec_on_host(Lab.attach(name), host, words)


@command.command("exec", cls=Verb, context_settings=_PASS_THROUGH)
@_NAME
@click.argument("host")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND…", required=True)
def execute(name: str, host: str, words: tuple[str, ...]) -> None:
    """Run COMMAND on HOST, without ssh, and end with its exit status."""
    exec_on_host(Lab.attach(name), host, words)


def exec_on_host(lab: Lab, host: str, arguments: tuple[str, ...]) -> None:
    command = arguments[1:] if arguments[:1] == ("--",) else arguments
    terminal = {key: os.environ[key] for key in ("TERM", "LANG", "COLORTERM") if key in os.environ}
    environment = {**lab.environment(host), **terminal}
    argv = lab.command(host, command or (environment["SHELL"],))
    os.execvpe(argv[0], argv, environment)  # noqa: S606 - becomes the command, with its status


class Fault(Verb):
    def sections(self, ctx: click.Context) -> list[Section]:
        return [("Faults", [Row(f"{fault.name} HOST {fault.usage}".strip(), fault.summary)
                            for fault in FAULTS.values()])]  # fmt: skip


@command.command("fault", cls=Fault, context_settings={"ignore_unknown_options": True})
@_NAME
@click.option("--undo", is_flag=True, help="End the fault instead.")
@click.argument("kind")
@click.argument("host")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def fault(name: str, undo: bool, kind: str, host: str, arguments: tuple[str, ...]) -> None:
    """Inject a fault into HOST; with --undo, end it."""
    lab = Lab.attach(name)
    (lab.undo if undo else lab.fault)(kind, host, *arguments)
    text = " ".join([kind, host, *arguments])
    say(f"fault ended: {text}" if undo else f"fault active: {text}")


@command.command("heal", cls=Verb)
@_NAME
@click.argument("host", required=False)
def heal(name: str, host: str | None) -> None:
    """End every fault of HOST, or of all hosts; start hosts and sshds that are off."""
    Lab.attach(name).heal(host)
    say(f"healed: {host or 'all hosts'}")
