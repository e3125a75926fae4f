"""``paceline trust``: lets the settings file of this folder name programs and hosts of the user."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.trust import foreign_reason, format_setting, guarded_settings, remember
from paceline.cli.verb import Verb, say
from paceline.spec.errors import SettingError
from paceline.spec.formatting import shell_text
from paceline.spec.settings import TOML_NAME


@click.command("trust", cls=Verb)
@click.argument("file", default=TOML_NAME)
@click.option("--revoke", is_flag=True, help="Revoke the trust.")
def command(file: str, revoke: bool) -> None:
    """Trust the settings in FILE that start programs or choose among your hosts.

    FILE is this folder's paceline.toml by default; it may also be a host file in TOML. Settings
    such as ssh-config, python, mpiexec and env are refused before you trust them. The trust covers
    the current values. If somebody else can change the file, it cannot be trusted.
    """
    from paceline.cli.settings_file import read_settings_file
    from paceline.hosts.source import load_toml

    path = Path.cwd() / file
    if not path.exists():
        raise SettingError(f"there is no {file} in this folder", found=str(Path.cwd()))
    if revoke:
        remember(path, {}, trusted=False)
        say(f"{path}: no longer trusted")
        return
    is_own = path.resolve() == (Path.cwd() / TOML_NAME).resolve()
    toml = read_settings_file(Path.cwd()) if is_own else load_toml(path)
    if reason := foreign_reason(path):
        remedy = "Copy it to a folder of yours"
        if "written" in reason:
            remedy = shell_text(["chmod", "go-w", file])
        raise SettingError(f"{path} cannot be trusted: it {reason}", remedy=remedy)
    needed = guarded_settings(toml)
    for name, value in needed.items():
        say(format_setting(name, value))
    if not needed:
        say(f"nothing in {path} needs trust")
        return
    remember(path, toml)
    say(f"trusted: {path}, until these settings change")
