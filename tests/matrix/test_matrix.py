"""The journeys of ``journeys.py`` in a selection of environments, each in a lab of its own.

``PACELINE_MATRIX`` names them, as ``4,5,6``; without it, the first three.
With ``PACELINE_MATRIX_FIRST`` the first journey that fails ends an environment, and
``PACELINE_MATRIX_SOURCE`` names another folder to take the package from (planted faults).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from environments import Environment, select
from journeys import JOURNEYS, is_refused
from sites import site

from conftest import require_lab
from paceline.lab import Lab

pytestmark = pytest.mark.lab
SELECTION = dict(enumerate(select(), 1))


def chosen() -> list[int]:
    """Numbers of the environments to try."""
    return [int(number) for number in os.environ.get("PACELINE_MATRIX", "1,2,3").split(",")]


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    """Only root may give hosts users and mounts of any kind."""
    require_lab(Lab.available() or ("root is needed" if os.geteuid() else None))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", chosen())
def test_environment(number: int, tmp_path: Path) -> None:
    environment = SELECTION[number]
    if shutil.which(environment.shell) is None:
        pytest.skip(f"not run: {environment.shell} is not installed: tools/system-parts.sh all")
    failed = try_everything(environment, tmp_path)
    if failed:
        how = f"environment {number}: {environment}\nalone: make matrix ONLY={number}"
        pytest.fail("\n".join([*failed, how]), pytrace=False)


def try_everything(environment: Environment, folder: Path) -> list[str]:
    """What failed: of each journey that did, why and what its commands wrote."""
    failed = []
    journeys = JOURNEYS if environment.is_usable else (is_refused,)
    with site(environment, folder) as made:
        for journey in journeys:
            before = len(made.transcript)
            try:
                journey(made)
            except Exception as error:
                why = f"failed journey: {journey.__name__}: {error!r}"
                failed += [why, *made.transcript[before:]]
                if os.environ.get("PACELINE_MATRIX_FIRST"):
                    break
    return failed
