"""Runs the journeys of ``journeys.py`` in selected environments, each in a lab of its own.

``PACELINE_MATRIX`` selects environments by number (``4,5,6``); the default is the first three. With
``PACELINE_MATRIX_FIRST``, an environment ends at its first failed journey.
``PACELINE_MATRIX_SOURCE`` names another folder to import the package from (planted faults).
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


def selected_environments() -> list[int]:
    """Returns the numbers of the environments to test."""
    return [int(number) for number in os.environ.get("PACELINE_MATRIX", "1,2,3").split(",")]


@pytest.fixture(scope="module", autouse=True)
def _require_root() -> None:
    """Skips the tests without root: only root may give hosts users and mounts of any kind."""
    require_lab(Lab.available() or ("root is needed" if os.geteuid() else None))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", selected_environments())
def test_environment(number: int, tmp_path: Path) -> None:
    environment = SELECTION[number]
    if shutil.which(environment.shell) is None:
        pytest.skip(f"not run: {environment.shell} is not installed: tools/system-parts.sh all")
    failed = run_journeys(environment, tmp_path)
    if failed:
        rerun_hint = f"environment {number}: {environment}\nalone: make matrix ONLY={number}"
        pytest.fail("\n".join([*failed, rerun_hint]), pytrace=False)


def run_journeys(environment: Environment, folder: Path) -> list[str]:
    """Runs all journeys; returns for each failed one the reason and what its commands printed."""
    failed = []
    journeys = JOURNEYS if environment.is_usable else (is_refused,)
    with site(environment, folder) as lab_site:
        for journey in journeys:
            start = len(lab_site.transcript)
            try:
                journey(lab_site)
            except Exception as error:
                message = f"failed journey: {journey.__name__}: {error!r}"
                failed += [message, *lab_site.transcript[start:]]
                if os.environ.get("PACELINE_MATRIX_FIRST"):
                    break
    return failed
