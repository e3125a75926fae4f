"""The selection of environments covers what it claims to."""

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


def test_every_pair_of_values_that_can_occur_together_is_tried() -> None:
    tried: set[frozenset[tuple[str, str]]] = set()
    for environment in select():
        tried |= pairs(environment)
    assert tried == all_pairs()


def test_pairs_are_those_of_the_axes_less_the_constraints() -> None:
    sizes = [len(values) for values in AXES.values()]
    product = sum(a * b for a, b in itertools.combinations(sizes, 2))
    assert len(all_pairs()) == product - len(CONSTRAINTS)


def test_constraints_name_values_that_exist() -> None:
    for (first, a), (second, b), reason in CONSTRAINTS:
        assert a in AXES[first], (first, a)
        assert b in AXES[second], (second, b)
        assert reason


def test_no_environment_breaks_a_constraint() -> None:
    for environment in select():
        assert is_possible(environment.values()), environment


def test_the_selection_is_the_same_each_time_and_another_for_another_seed() -> None:
    assert select(3) == select(3)
    assert select(3) != select(4)


def test_about_twenty_five_environments_suffice() -> None:
    assert 25 <= len(select()) <= 32


def test_the_first_three_differ_in_homes_and_users() -> None:
    """They are what ``make test`` runs."""
    first = select()[:3]
    assert {environment.home == "private" for environment in first} == {True, False}
    assert len({environment.user for environment in first}) > 1
    assert all(environment.is_usable for environment in first)


def test_make_test_all_tries_every_value() -> None:
    """Those of ``make test`` and the rest, which the Makefile names."""
    (rest,) = re.findall(r"^REST_OF_MATRIX := (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    selection = select()
    tried = [*selection[:3], *(selection[int(number) - 1] for number in rest.split(","))]
    for axis, values in AXES.items():
        assert {getattr(environment, axis) for environment in tried} == set(values), axis


def test_where_no_command_runs_only_the_start_up_file_is_tried() -> None:
    usable = dict(select()[0].values())
    refused = Environment(**{**usable, "startup": "exits", "shell": "bash"})
    assert all(("startup", "exits") in pair for pair in pairs(refused))
    assert len(pairs(refused)) == len(AXES) - 1


def test_faults_of_the_benchmark_can_still_be_planted(tmp_path: Path) -> None:
    for fault in planted.FAULTS:
        source = ROOT / "src" / "paceline" / fault.file
        target = tmp_path / fault.file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
        fault.plant(tmp_path)
        assert any(fault.concerns(environment) for environment in select()), fault.name
