"""Tests what ``paceline setup env`` says at its end."""

from __future__ import annotations

from paceline.cli.verbs.setup.env import _describe_use
from paceline.hosts.dialects.toml_tables import tomllib


def test_different_folders_are_settings_of_hosts() -> None:
    folders = {"n1": "/home/ann/env", "n2.example": "/home/bob/env"}
    _, _, settings = _describe_use(folders, "bin/python").partition("\n")
    pythons = {name: host["python"] for name, host in tomllib.loads(settings)["hosts"].items()}
    assert pythons == {name: f"{folder}/bin/python" for name, folder in folders.items()}
