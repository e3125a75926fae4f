"""Tests that the selection of environments covers all pairs of values."""

from __future__ import annotations

import itertools
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "matrix"))
import planted  # noqa: E402
from environments import (  # noqa: E402
    AXES,
    CONSTRAINTS,
    Environment,
    all_pairs,
    is_possible,
    pairs,
    select,
)


def test_selection_covers_possible_value_pairs() -> None:
    covered: set[frozenset[tuple[str, str]]] = set()
    for environment in select():
        covered |= pairs(environment)
    assert covered == all_pairs()


def test_all_pairs_excludes_constraints() -> None:
    sizes = [len(values) for values in AXES.values()]
    product = sum(a * b for a, b in itertools.combinations(sizes, 2))
    assert len(all_pairs()) == product - len(CONSTRAINTS)


def test_constraints_use_existing_values() -> None:
    for (first, a), (second, b), reason in CONSTRAINTS:
        assert a in AXES[first], (first, a)
        assert b in AXES[second], (second, b)
        assert reason


def test_selection_satisfies_constraints() -> None:
    for environment in select():
        assert is_possible(environment.values()), environment


def test_selection_is_deterministic_per_seed() -> None:
    assert select(3) == select(3)
    assert select(3) != select(4)


def test_selection_has_25_to_32_environments() -> None:
    assert 25 <= len(select()) <= 32


def test_first_three_environments_differ_in_home_and_user() -> None:
    """``make test`` runs these three."""
    first = select()[:3]
    assert {environment.home == "private" for environment in first} == {True, False}
    assert len({environment.user for environment in first}) > 1
    assert all(environment.is_usable for environment in first)


def test_make_test_all_covers_axis_values() -> None:
    """It tries those of ``make test`` and the others that the Makefile names."""
    (remaining,) = re.findall(r"^REST_OF_MATRIX := (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    selection = select()
    covered = [*selection[:3], *(selection[int(number) - 1] for number in remaining.split(","))]
    for axis, values in AXES.items():
        assert {getattr(environment, axis) for environment in covered} == set(values), axis


def test_unusable_environment_pairs_include_startup_file() -> None:
    usable = dict(select()[0].values())
    unusable = Environment(**{**usable, "startup": "exits", "shell": "bash"})
    assert all(("startup", "exits") in pair for pair in pairs(unusable))
    assert len(pairs(unusable)) == len(AXES) - 1


def test_benchmark_faults_can_be_planted(tmp_path: Path) -> None:
    for fault in planted.FAULTS:
        source = ROOT / "src" / "paceline" / fault.file
        target = tmp_path / fault.file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
        fault.plant(tmp_path)
        assert any(fault.concerns(environment) for environment in select()), fault.name
