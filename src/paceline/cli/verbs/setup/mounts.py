"""``paceline setup mounts``: what to type to mount a shared folder."""

from __future__ import annotations

from typing import Any

import click

from paceline.cli.verb import Verb, say
from paceline.setup import lines
from paceline.spec.errors import SettingError


@click.command("mounts", cls=Verb)
@click.option("--kind", type=click.Choice(["nfs", "cifs"]), required=True,
              help="Kind of server: nfs, or cifs for Windows and Samba.")  # fmt: skip
@click.option("--server", required=True, help="Name or address.")
@click.option("--path", required=True, help="Exported path (nfs) or name of the share (cifs).")
@click.option("--at", required=True, help="Mount point on every host.")
@click.option("--user", default="", help="Account on the server (cifs).")
@click.option(
    "--uid",
    type=click.IntRange(0),
    help="Owner of the files on the hosts (cifs).",
    show_default="your own",
)
@click.option(
    "--gid",
    type=click.IntRange(0),
    help="Group of the files on the hosts (cifs).",
    show_default="your own",
)
def command(kind: Any, server: str, path: str, at: str, user: str, uid: int | None,
           gid: int | None) -> None:  # fmt: skip
    """Print the commands that mount a shared folder on every host. Change nothing."""
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
