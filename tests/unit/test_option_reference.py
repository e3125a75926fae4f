"""Tests that the reference page of options shows the options of all commands and recipes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import option_reference

from paceline.cli.options import settings_registry
from paceline.cli.variables import variable_of


def test_page_is_current() -> None:
    written = option_reference.PAGE.read_text(encoding="utf-8")
    assert written == option_reference.render(), "run python tools/option_reference.py"


def test_page_has_every_setting_with_its_variable() -> None:
    text = option_reference.render()
    for key, option in settings_registry().items():
        assert f"`--{key}`" in text
        assert f"`{variable_of(option)}`" in text
