"""``paceline setup``: prepares the machines; says what before it does it; takes it back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from paceline.cli.applies import refuse_beside
from paceline.cli.flags import IFACE, NPROC_PER_NODE, OTHER_HOSTS, SSH_CONFIG, with_settings
from paceline.cli.launch import chosen_hosts
from paceline.cli.setup_containers import command as containers
from paceline.cli.sources import setting
from paceline.cli.verb import Verb, VerbGroup, say
from paceline.remote import this_machine
from paceline.remote.openssh import SshOptions
from paceline.setup import keys, lines
from paceline.setup.accelerate import PRECISIONS
from paceline.setup.journal import Journal, undo, write_file
from paceline.setup.keys import Identity
from paceline.spec.errors import ConnectError, NodeError, PacelineError, SettingError
from paceline.spec.helptext import counted
from paceline.spec.hosts import Host

if TYPE_CHECKING:
    from paceline.setup.access import AccessStatus

F = TypeVar("F", bound=Callable[..., Any])


def host_options(command: F) -> F:
    """Adds the options that say which hosts."""
    return with_settings(command, [OTHER_HOSTS, SSH_CONFIG])


@click.group("setup", cls=VerbGroup, invoke_without_command=True)
@host_options
@click.option(
    "--key",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Identity to use; made when it does not exist. Default: one that ssh offers"
    " already, else ~/.ssh/id_ed25519.",
)
@click.option(
    "--key-type",
    type=click.Choice(list(keys.KINDS)),
    default="ed25519",
    help="Kind of a new key (rsa: 4096 bits).",
)
@click.option(
    "--password-stdin",
    is_flag=True,
    help="Read the hosts' password from standard input instead of asking for it.",
)
@click.option("-y", "--yes", is_flag=True, help="Do it without asking; pins the host keys shown.")
@click.option("-n", "--dry-run", is_flag=True, help="Say what would be done, and stop.")
@click.option("--revoke", is_flag=True, help="Take back exactly what setup has done.")
@click.pass_context
def command(ctx: click.Context, /, key: Path | None, key_type: str, password_stdin: bool,
            yes: bool, dry_run: bool, revoke: bool, **_: object) -> None:  # fmt: skip
    """Set up SSH login from this machine to every host: key, pinned host keys, ssh config.

    Safe to repeat: what is done already stays as it is. Further parts have commands of their own.
    """
    own = ("key", "key_type", "password_stdin")
    if ctx.invoked_subcommand is not None:
        # --dry-run above all: the part would not hear of it, and do its work
        refuse_beside(ctx, f"setup {ctx.invoked_subcommand}", (*own, "yes", "dry_run", "revoke"))
        return
    if revoke:
        refuse_beside(ctx, "--revoke", own)
    import asyncio

    from paceline.setup import access

    chosen, ssh = cluster_hosts(ctx)
    journal = Journal.read()
    if revoke:
        ctx.exit(asyncio.run(take_all_back(chosen, ssh, journal, dry_run)))
    looks = asyncio.run(access.check_access(chosen, ssh))
    identity = find_identity(key, chosen, ssh)
    todo = plan(looks, identity, key_type, alias_text(chosen, identity, key))
    show_plan(looks, todo)
    if todo and not dry_run:
        confirm(looks, yes)
        do(ctx, looks, identity, key_type, ssh, journal)
    ctx.exit(1 if any(one.state == "refused" for one in looks) else 0)


def cluster_hosts(ctx: click.Context) -> tuple[tuple[Host, ...], SshOptions]:
    """The hosts and how to reach them. SettingError when none but this machine is meant."""
    take_from_parent(ctx)
    cluster = chosen_hosts(ctx)
    if all(host.local for host in cluster.hosts):
        raise SettingError("setup needs hosts other than this machine", remedy="-H n1,n2 or a file")
    return cluster.hosts, SshOptions(ctx.params["ssh_config"])


def take_from_parent(ctx: click.Context) -> None:
    """Options typed before the name of the part count as if they stood behind it."""
    before = ctx.parent
    for name in ("hosts", "ssh_config"):
        if before is None or before.params.get(name) is None:
            continue
        if setting(before, name).source > setting(ctx, name).source:
            ctx.params[name] = before.params[name]
            source = before.get_parameter_source(name)
            assert source is not None
            ctx.set_parameter_source(name, source)


def find_identity(key: Path | None, hosts: Sequence[Host], ssh: SshOptions) -> Identity:
    """The identity that ssh would offer the hosts, or the one to be made."""
    import asyncio

    from paceline.setup.login import effective_config

    other = next(host for host in hosts if not host.local)
    config = asyncio.run(effective_config(other, ssh))
    files = [Path(name).expanduser() for name in config.get("identityfile", [])]
    folder = Path("~/.ssh").expanduser()
    files += [folder / name for name in keys.DEFAULT_NAMES]
    return keys.choose_identity(
        key and key.expanduser().absolute(), files, keys.agent_keys(), folder
    )


def alias_text(hosts: Sequence[Host], identity: Identity, key: Path | None) -> str:
    """Our part of the ssh config; empty when ssh needs none."""
    named = identity.private if key is not None else None
    others = [host for host in hosts if not host.local]
    if not any(lines.needs_alias(host, named) for host in others):
        return ""
    return lines.alias_blocks(others, named)


def plan(looks: Sequence[AccessStatus], identity: Identity, kind: str, alias: str) -> list[str]:
    """What is to be done, one line a step. Pure but for the ssh config that is there."""
    todo = []
    unknown = [one for one in looks if one.state == "unpinned"]
    lacking = [one for one in looks if one.state in ("no key", "unpinned")]
    if lacking and not identity.exists:
        todo.append(f"make an {kind} key without passphrase: {identity.private}")
    todo += [f"pin the host key of {one.host.name}: {one.fingerprint}" for one in unknown]
    if lacking:
        names = ", ".join(one.host.name for one in lacking)
        todo.append(
            f"install the public key on {names}, where it is not yet (asks for the password once)"
        )
    folder = Path("~/.ssh").expanduser()
    if alias and _read(folder / lines.ALIASES) != alias:
        todo.append(f"write aliases to {folder / lines.ALIASES}, included by {folder / 'config'}")
    return todo


def show_plan(looks: Sequence[AccessStatus], todo: Sequence[str]) -> None:
    """Each host's state, then the access."""
    for one in looks:
        if one.state == "works":
            here = "this machine" if one.host.local else "SSH login already works"
            say(f"{one.host.name}: {here}")
        elif one.state == "refused" and one.refusal is not None:
            say(f"{one.host.name}: {one.refusal.cause}: {one.refusal.found}")
            say(f"  remedy: {one.refusal.remedy}")
    refused = [one.host.name for one in looks if one.state == "refused"]
    if not todo:
        say(f"nothing can be done yet for {', '.join(refused)}: see above" if refused
                   else "nothing to do")  # fmt: skip
        return
    say(f"to do, but for {', '.join(refused)}:" if refused else "to do:")
    for step in todo:
        say(f"  {step}")


def confirm(looks: Sequence[AccessStatus], yes: bool) -> None:
    """Asks. SettingError when there is nobody to ask."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise SettingError("nobody can be asked here", remedy="Look at the list above, then add -y")
    click.confirm(
        "Compare the fingerprints with the machines' own. Go on?"
        if any(one.state == "unpinned" for one in looks)
        else "Go on?",
        abort=True,
    )


def do(ctx: click.Context, looks: Sequence[AccessStatus], identity: Identity, kind: str,
       ssh: SshOptions, journal: Journal) -> None:  # fmt: skip
    """Does the steps in order, and looks again. ConnectError for hosts that still refuse."""
    import asyncio

    from paceline.setup import access
    from paceline.setup.login import PasswordServer

    hosts = [one.host for one in looks]
    unpinned = [one for one in looks if one.state == "unpinned"]
    needed = any(one.state in ("no key", "unpinned") for one in looks)
    if needed and not identity.exists:
        identity = keys.make_key_pair(identity, kind, journal)
        say(f"made {identity.private}: {keys.fingerprint(identity.public)}")
    write_aliases(alias_text(hosts, identity, ctx.params["key"]), journal)
    if unpinned:
        if wrong := asyncio.run(access.pin_host_keys(unpinned, ssh, journal)):
            raise ConnectError(
                "a host showed two keys",
                found="\n".join(wrong),
                remedy="Somebody may be in between: do not go on",
            )
        say(f"pinned {', '.join(one.host.name for one in unpinned)}")
    again = asyncio.run(access.check_access(hosts, ssh)) if needed else list(looks)
    lacking = [one for one in again if one.state == "no key"]
    if lacking:
        with PasswordServer(ask_password(ctx, lacking)) as passwords:
            failed = asyncio.run(
                access.install_keys(lacking, ssh, identity.public, passwords, journal, say)
            )
        verify(hosts, ssh, failed)


def verify(hosts: Sequence[Host], ssh: SshOptions, failed: dict[str, str]) -> None:
    """Looks whether the login works on every host now."""
    import asyncio

    from paceline.setup import access

    after = asyncio.run(access.check_access(hosts, ssh))
    out = [one for one in after if one.state != "works"]
    if out:
        found = [f"{one.host.name}: {failed.get(one.host.name) or _words(one)}" for one in out]
        names = ", ".join(one.host.name for one in out)
        raise ConnectError(
            f"{names} still refuse the login",
            found="\n".join(found),
            remedy="Type the same command again; other passwords: one host at a time, -H NAME",
        )
    say(f"SSH login works on {counted(len(hosts), 'host')}")


def _words(one: AccessStatus) -> str:
    return one.refusal.found.splitlines()[-1] if one.refusal else one.state


def write_aliases(text: str, journal: Journal) -> None:
    """Writes our part of the ssh config and includes it."""
    if not text:
        return
    folder = Path("~/.ssh").expanduser()
    config = folder / "config"
    write_file(journal, folder / lines.ALIASES, text.encode(), 0o600)
    new = lines.with_include(_read(config) or "")
    write_file(journal, config, new.encode(), 0o600, (lines.INCLUDE,))


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def ask_password(ctx: click.Context, looks: Sequence[AccessStatus]) -> str:
    """The password for these hosts, asked for once."""
    if ctx.params["password_stdin"]:
        return sys.stdin.readline().rstrip("\n")
    names = ", ".join(one.host.name for one in looks)
    if not sys.stdin.isatty():
        raise SettingError(
            f"{names}: a password is needed and nobody can be asked here",
            remedy="--password-stdin, or type the command on a terminal",
        )
    return str(click.prompt(f"Password for {names}", hide_input=True))


async def take_all_back(hosts: Sequence[Host], ssh: SshOptions, journal: Journal,
                        dry_run: bool) -> int:  # fmt: skip
    """Undoes the journal, other hosts first: the login key goes last."""
    from paceline.setup import access

    by_name = {host.name: host for host in hosts}
    remote = [change for change in reversed(journal.changes) if change.host]
    local = [change for change in reversed(journal.changes) if not change.host]
    if not remote and not local:
        say("nothing to take back")
        return 0
    if dry_run:
        for change in (*remote, *local):
            say(f"would restore {change.path} on {change.host or 'this machine'}")
        return 0
    if not await access.revoke_keys(remote, by_name, ssh, journal, say):
        say("kept this machine's part, to be able to try again")
        return 1
    for change in local:
        say(undo(change))
        journal.forget(change)
    return 0


@command.command("sshd", cls=Verb)
@host_options
@click.argument("action", type=click.Choice(["start", "stop", "status"]))
@click.option("--port", type=int, default=12345, help="Where it listens.")
@click.option("--address", default="0.0.0.0", help="On which address.")  # noqa: S104 - keys only
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="Where its files are.",
    show_default="~/.local/state/paceline/sshd/HOST",
)
@click.pass_context
def sshd(ctx: click.Context, /, action: str, port: int, address: str, folder: Path | None,
         **_: object) -> None:  # fmt: skip
    """An sshd of your own, without root: on this machine, or on the hosts of `setup -H`."""
    import asyncio

    from paceline.setup import worker_sshd

    words = [action, "--port", str(port), "--address", address]
    words += ["--folder", str(folder)] if folder else []
    take_from_parent(ctx)
    if ctx.params["hosts"] is None:
        ctx.exit(worker_sshd.main(words))
    hosts, ssh = cluster_hosts(ctx)
    ctx.exit(asyncio.run(_sshd_everywhere(hosts, ssh, words, Path(worker_sshd.__file__))))


async def _sshd_everywhere(hosts: Sequence[Host], ssh: SshOptions, words: list[str],
                           source: Path) -> int:  # fmt: skip
    import asyncio

    from paceline.setup.login import run_on_host

    text = source.read_text(encoding="utf-8")
    answers = await asyncio.gather(
        *(run_on_host(h, ssh, ["python3", "-", *words], text) for h in hosts)
    )
    for host, answer in zip(hosts, answers, strict=True):
        said = answer.refusal.found if answer.refusal else answer.output or answer.messages
        for line in said.strip().splitlines():
            say(f"{host.name}: {line}")
    return max(answer.status for answer in answers)


@command.command("env", cls=Verb)
@host_options
@click.option(
    "--requirements",
    required=True,
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Requirements or lock file.",
)
@click.option(
    "--folder",
    default="~/.local/share/paceline/env",
    show_default=True,
    help="Where the environment goes, on every host.",
)
@click.option("--python", default="python3", show_default=True, help="Makes it, on every host.")
@click.option("--offline", is_flag=True, help="Ship the wheels from here.")
@click.option(
    "--activate",
    default="",
    metavar="LINE",
    help="Shell line before the interpreter starts, such as `module load cuda`.",
)
@click.pass_context
def env(ctx: click.Context, /, requirements: Path, folder: str, python: str, offline: bool,
        activate: str, **_: object) -> None:  # fmt: skip
    """A Python environment on every host, from one requirements file."""
    import asyncio

    from paceline.setup import environments

    hosts, ssh = cluster_hosts(ctx)
    wanted = environments.EnvironmentSpec(requirements, folder, python, activate, offline)
    wheels = environments.download_wheels(requirements) if offline else None
    try:
        asyncio.run(_environments(hosts, ssh, wanted, wheels))
    finally:
        if wheels is not None:
            import shutil

            shutil.rmtree(wheels)
    interpreter = f"{folder}/bin/python{'-activated' if activate else ''}"
    say(f"use it: paceline run --python {interpreter} … (with ~ written out)")


async def _environments(hosts: Sequence[Host], ssh: SshOptions, wanted: Any,
                        wheels: Path | None) -> None:  # fmt: skip
    import asyncio

    from paceline.remote.fanout import connect_all
    from paceline.setup import environments

    channels = await connect_all(hosts, [wanted.python] * len(hosts), ssh)
    try:
        makers = await environments.one_node_per_disk(channels, wanted)
        for channel, maker in zip(channels, makers, strict=True):
            if channel is not maker:
                say(f"{channel.host.name}: {wanted.folder} is on the same disk as that of"
                    f" {maker.host.name}")  # fmt: skip
        work = [_environment(maker, wanted, wheels) for maker in dict.fromkeys(makers)]
        failed = [error for error in await asyncio.gather(*work) if error is not None]
    finally:
        await asyncio.gather(*(channel.close(5.0) for channel in channels))
    if failed:
        raise environments.combine_failures(failed)


async def _environment(channel: Any, wanted: Any, wheels: Path | None) -> PacelineError | None:
    """Makes it on one node; its failure does not end the work on the others."""
    import asyncio

    from paceline.setup import environments

    try:
        say(await environments.make_environment(channel, wanted, wheels))
    except PacelineError as error:
        return error
    except (ConnectionError, asyncio.TimeoutError) as error:
        what = "the connection ended" if isinstance(error, ConnectionError) else "no answer in time"
        return NodeError(f"{channel.host.name}: {what}", remedy="Type the same command again")
    return None


@command.command("mounts", cls=Verb)
@click.option("--kind", type=click.Choice(["nfs", "cifs"]), required=True,
              help="Kind of server: nfs, or cifs for Windows and Samba.")  # fmt: skip
@click.option("--server", required=True, help="Name or address.")
@click.option("--path", required=True, help="Exported path (nfs) or name of the share (cifs).")
@click.option("--at", required=True, help="Where it is to be seen on every host.")
@click.option("--user", default="", help="Account on the server (cifs).")
@click.option(
    "--uid", type=click.IntRange(0), help="Owner of the files on the hosts (cifs); yours."
)
@click.option(
    "--gid", type=click.IntRange(0), help="Group of the files on the hosts (cifs); yours."
)
def mounts(kind: Any, server: str, path: str, at: str, user: str, uid: int | None,
           gid: int | None) -> None:  # fmt: skip
    """Print what to type on every host to mount a shared folder. Changes nothing."""
    import os

    if kind == "cifs" and not user:
        raise SettingError("a cifs share needs an account", remedy="--user NAME")
    if kind == "nfs" and (uid is not None or gid is not None):
        raise SettingError("--uid and --gid are for cifs: nfs has the server's own owners")
    owner = os.getuid() if uid is None else uid, os.getgid() if gid is None else gid
    share = lines.Share(kind, server, path, at, user, *owner)
    say(f"# line of /etc/fstab:\n{lines.fstab_line(share)}\n\n# on every host:")
    say("\n".join(lines.mount_commands(share)))
    say(f"\n# then: paceline check -H HOSTS --shared {at}")


@command.command("hosts", cls=Verb)
@host_options
@click.pass_context
def names(ctx: click.Context, /, **_: object) -> None:
    """Print lines for /etc/hosts, and what is wrong with those that are there. Changes nothing."""
    import asyncio

    from paceline.checks.check import Requirements
    from paceline.checks.runner import survey_hosts

    hosts, ssh = cluster_hosts(ctx)
    pythons = {host.name: host.python or this_machine.default_python() for host in hosts}
    requirements = Requirements(pythons, dict.fromkeys(pythons, str(Path.cwd())))
    survey = asyncio.run(survey_hosts(hosts, ssh, requirements, "quick"))
    addresses = {name: survey.address(name) for name in survey.names}
    say("# the same lines for /etc/hosts of every host:")
    say("\n".join(lines.hosts_lines(addresses, survey.facts)))
    for name in survey.names:
        for line in lines.loopback_lines(survey.facts[name]):
            say(f"# on {name}, take the own name off line {line}")


def machine_options(command: F) -> F:
    """Adds the options that say which hosts, and how many processes where."""
    return with_settings(command, [OTHER_HOSTS, SSH_CONFIG, NPROC_PER_NODE, IFACE])


@command.command("accelerate", cls=Verb)
@machine_options
@click.option(
    "--port",
    type=click.IntRange(1024, 65535),
    default=29500,
    show_default=True,
    help="Where the first machine listens.",
)
@click.option(
    "--mixed-precision",
    type=click.Choice(PRECISIONS),
    default="no",
    show_default=True,
    help="Accelerate's mixed_precision.",
)
@click.option("--install", is_flag=True, help="Write it on the hosts, where Accelerate looks.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("accelerate-config"),
    show_default=True,
    help="Folder to write here.",
)
@click.pass_context
def accelerate_files(ctx: click.Context, /, **_: object) -> None:
    """Write each machine's YAML for `accelerate launch`: kind, rank, address, processes."""
    from paceline.cli.setup_accelerate import write

    if ctx.params["install"]:
        refuse_beside(ctx, "--install", ("out",))
    write(*cluster_hosts(ctx), ctx.params)


command.add_command(containers)
