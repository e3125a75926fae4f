"""Tests that every command in the reference pages runs; others: ``test_documents_run.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_documents_run import is_reference, place, to_type, type_page

from paceline.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.slow]
__all__ = ["place"]


@pytest.mark.parametrize("page", [page for page in to_type() if is_reference(page)])
def test_page_runs(page: str, place: tuple[Lab, Path]) -> None:
    type_page(page, *place)
