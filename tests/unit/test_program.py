"""Tests of what programs of the package share."""

from __future__ import annotations

import sys

import pytest

from paceline.program import library
from paceline.spec.errors import SettingError


def test_missing_library_is_installed_where_it_is_missing() -> None:
    """``paceline`` itself may have been sent there: its extras are then not known to pip."""
    with pytest.raises(SettingError, match="--tasks are evaluated") as caught:
        library("no_such_library.part", "--tasks are evaluated")
    assert f"{sys.executable} -m pip install --upgrade no-such-library" in caught.value.render()
