"""``paceline setup``: prepares the machines; says what before it does it; takes it back."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.applicability import reject_combination
from paceline.cli.verb import VerbGroup, say
from paceline.cli.verbs.setup import accelerate, containers, env, hosts, mounts, sshd
from paceline.cli.verbs.setup.targets import cluster_hosts, host_options
from paceline.remote.openssh import SshOptions
from paceline.setup import keys, lines
from paceline.setup.journal import Journal, undo, write_file
from paceline.setup.keys import Identity
from paceline.spec.errors import ConnectError, SettingError
from paceline.spec.formatting import pluralize
from paceline.spec.hosts import Host

if TYPE_CHECKING:
    from paceline.setup.access import AccessStatus


@click.group("setup", cls=VerbGroup, invoke_without_command=True)
@host_options
@click.option("--key", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Private key to use; it is made if it does not exist. Default: one that ssh"
                   " already offers, otherwise ~/.ssh/id_ed25519.")  # fmt: skip
@click.option("--key-type", type=click.Choice(list(keys.KINDS)), default="ed25519",
              help="Type of a new key (rsa: 4096 bits).")  # fmt: skip
@click.option("--password-stdin", is_flag=True,
              help="Read the hosts' password from standard input instead of asking for"
                   " it.")  # fmt: skip
@click.option("-y", "--yes", is_flag=True, help="Do not ask; accept the host keys shown.")
@click.option("-n", "--dry-run", is_flag=True, help="Print what would be done, and exit.")
@click.option("--revoke", is_flag=True, help="Undo exactly what setup has done.")
@click.pass_context
def command(ctx: click.Context, /, key: Path | None, key_type: str, password_stdin: bool,
            yes: bool, dry_run: bool, revoke: bool, **_: object) -> None:  # fmt: skip
    """Set up SSH login from this machine to every host: key, known host keys, ssh config.

    The command is safe to repeat. Other parts of the setup have commands of their own.
    """
    own_options = ("key", "key_type", "password_stdin")
    if ctx.invoked_subcommand is not None:
        # --dry-run above all: the part would not hear of it, and do its work
        names = (*own_options, "yes", "dry_run", "revoke")
        reject_combination(ctx, f"setup {ctx.invoked_subcommand}", names)
        return
    if revoke:
        reject_combination(ctx, "--revoke", own_options)
    import asyncio

    from paceline.setup import access

    hosts, ssh = cluster_hosts(ctx)
    journal = Journal.read()
    if revoke:
        ctx.exit(asyncio.run(revoke_all(hosts, ssh, journal, dry_run)))
    states = asyncio.run(access.check_access(hosts, ssh))
    identity = choose_identity(key, hosts, ssh)
    todo = plan(states, identity, key_type, alias_text(hosts, identity, key))
    show_plan(states, todo)
    if todo and not dry_run:
        confirm(states, yes)
        set_up(ctx, states, identity, key_type, ssh, journal)
    ctx.exit(1 if any(state.state == "refused" for state in states) else 0)


def choose_identity(key: Path | None, hosts: Sequence[Host], ssh: SshOptions) -> Identity:
    """Returns the identity that ssh would offer the hosts, or the one to make."""
    import asyncio

    from paceline.remote.login import effective_config

    remote_host = next(host for host in hosts if not host.local)
    config = asyncio.run(effective_config(remote_host, ssh))
    files = [Path(name).expanduser() for name in config.get("identityfile", [])]
    folder = Path("~/.ssh").expanduser()
    files += [folder / name for name in keys.DEFAULT_NAMES]
    return keys.choose_identity(
        key and key.expanduser().absolute(), files, keys.agent_keys(), folder
    )


def alias_text(hosts: Sequence[Host], identity: Identity, key: Path | None) -> str:
    """Returns our part of the ssh config; empty if ssh needs none."""
    key_file = identity.private if key is not None else None
    remote_hosts = [host for host in hosts if not host.local]
    if not any(lines.needs_alias(host, key_file) for host in remote_hosts):
        return ""
    return lines.alias_blocks(remote_hosts, key_file)


def plan(states: Sequence[AccessStatus], identity: Identity, kind: str, alias: str) -> list[str]:
    """Lists the steps to do, one per line. Pure except for reading the ssh config."""
    todo = []
    unknown = [state for state in states if state.state == "unpinned"]
    lacking = [state for state in states if state.state in ("no key", "unpinned")]
    if lacking and not identity.exists:
        todo.append(f"make an {kind} key without passphrase: {identity.private}")
    todo += [f"pin the host key of {state.host.name}: {state.fingerprint}" for state in unknown]
    if lacking:
        names = ", ".join(state.host.name for state in lacking)
        todo.append(
            f"install the public key on {names}, where it is not yet (asks for the password once)"
        )
    folder = Path("~/.ssh").expanduser()
    if alias and _read(folder / lines.ALIASES) != alias:
        todo.append(f"write aliases to {folder / lines.ALIASES}, included by {folder / 'config'}")
    return todo


def show_plan(states: Sequence[AccessStatus], todo: Sequence[str]) -> None:
    for state in states:
        if state.state == "works":
            location = "this machine" if state.host.local else "SSH login already works"
            say(f"{state.host.name}: {location}")
        elif state.state == "refused" and state.refusal is not None:
            say(f"{state.host.name}: {state.refusal.cause}: {state.refusal.details}")
            say(f"  remedy: {state.refusal.remedy}")
    unreachable = [state.host.name for state in states if state.state == "refused"]
    if not todo:
        say(f"nothing can be done yet for {', '.join(unreachable)}: see above" if unreachable
                   else "nothing to do")  # fmt: skip
        return
    say(f"to do, but for {', '.join(unreachable)}:" if unreachable else "to do:")
    for step in todo:
        say(f"  {step}")


def confirm(states: Sequence[AccessStatus], yes: bool) -> None:
    """Asks the user; SettingError without a terminal."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise SettingError(
            "there is no terminal to ask on", remedy="Look at the list above, then add -y"
        )
    has_unpinned = any(state.state == "unpinned" for state in states)
    hint = "Compare the fingerprints with the machines' own. " if has_unpinned else ""
    click.confirm(f"{hint}Go on?", abort=True)


def set_up(ctx: click.Context, states: Sequence[AccessStatus], identity: Identity, kind: str,
       ssh: SshOptions, journal: Journal) -> None:  # fmt: skip
    """Does the steps in order, and looks again. ConnectError for hosts that still refuse."""
    import asyncio

    from paceline.setup import access
    from paceline.setup.login import PasswordServer

    hosts = [state.host for state in states]
    unpinned = [state for state in states if state.state == "unpinned"]
    needed = any(state.state in ("no key", "unpinned") for state in states)
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
        say(f"pinned {', '.join(state.host.name for state in unpinned)}")
    rechecked = asyncio.run(access.check_access(hosts, ssh)) if needed else list(states)
    lacking = [state for state in rechecked if state.state == "no key"]
    if lacking:
        with PasswordServer(read_password(ctx, lacking)) as passwords:
            installing = access.install_keys(lacking, ssh, identity.public, passwords, journal, say)
            failed = asyncio.run(installing)
        verify(hosts, ssh, failed)


def verify(hosts: Sequence[Host], ssh: SshOptions, failed: dict[str, str]) -> None:
    import asyncio

    from paceline.setup import access

    states = asyncio.run(access.check_access(hosts, ssh))
    failing = [state for state in states if state.state != "works"]
    if failing:
        problems = []
        for state in failing:
            details = state.refusal.details.splitlines()[-1] if state.refusal else state.state
            problems.append(f"{state.host.name}: {failed.get(state.host.name) or details}")
        names = ", ".join(state.host.name for state in failing)
        raise ConnectError(
            f"{names} still refuse the login",
            found="\n".join(problems),
            remedy="Type the same command again; other passwords: one host at a time, -H NAME",
        )
    say(f"SSH login works on {pluralize(len(hosts), 'host')}")


def write_aliases(text: str, journal: Journal) -> None:
    if not text:
        return
    folder = Path("~/.ssh").expanduser()
    config = folder / "config"
    write_file(journal, folder / lines.ALIASES, text.encode(), 0o600)
    content = lines.with_include(_read(config) or "")
    write_file(journal, config, content.encode(), 0o600, (lines.INCLUDE,))


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def read_password(ctx: click.Context, states: Sequence[AccessStatus]) -> str:
    """Asks once for the password of these hosts."""
    if ctx.params["password_stdin"]:
        return sys.stdin.readline().rstrip("\n")
    names = ", ".join(state.host.name for state in states)
    if not sys.stdin.isatty():
        raise SettingError(
            f"{names}: a password is needed and there is no terminal to ask on",
            remedy="--password-stdin, or type the command on a terminal",
        )
    return str(click.prompt(f"Password for {names}", hide_input=True))


async def revoke_all(hosts: Sequence[Host], ssh: SshOptions, journal: Journal,
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


for part in (sshd, env, mounts, hosts, accelerate, containers):
    command.add_command(part.command)
