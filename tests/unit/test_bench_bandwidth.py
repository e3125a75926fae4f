"""The arithmetic of collectives against hand calculation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.bandwidth import (
    COLLECTIVES,
    TYPES,
    best,
    bus_factor,
    elements,
    parse_size,
    row,
    share,
    sizes,
    text,
)
from paceline.cli.bench_collectives import Found, conclusion, hosts_of, judge
from paceline.report.heatmap import svg
from paceline.spec.errors import SettingError

# 1 GB in 0.1 s on 4 ranks: 10 GB/s, times the factor of nccl-tests' PERFORMANCE.md
BY_HAND = {"all_reduce": 15.0, "all_gather": 7.5, "reduce_scatter": 7.5, "broadcast": 10.0,
           "reduce": 10.0, "all_to_all": 7.5, "sendrecv": 10.0}  # fmt: skip


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_bus_bandwidth_by_hand(collective: str) -> None:
    found = row(collective, 250_000_000, "float", "sum", 0, 4, 0.1, 0)
    assert found.algbw == pytest.approx(10.0)
    assert found.busbw == pytest.approx(BY_HAND[collective])
    assert found.time_us == pytest.approx(100_000)


def test_one_rank_moves_nothing() -> None:
    assert bus_factor("all_reduce", 1) == 0
    assert bus_factor("all_gather", 1) == 0


@given(st.sampled_from(COLLECTIVES), st.integers(1, 1 << 20), st.sampled_from(sorted(TYPES)),
       st.integers(1, 64))  # fmt: skip
def test_buffers_can_be_divided(collective: str, size: int, kind: str, ranks: int) -> None:
    count = elements(collective, size, TYPES[kind], ranks)
    assert count >= 1
    if collective in ("all_gather", "reduce_scatter", "all_to_all"):
        assert count % ranks == 0


def test_sizes_and_their_errors() -> None:
    assert sizes(8, 64, 2, 0) == [8, 16, 32, 64]
    assert sizes(8, 20, 2, 5) == [8, 13, 18]
    assert [parse_size(text) for text in ("8", "64K", "2m", "1GiB")] == [8, 65536, 2 << 20, 1 << 30]
    for bad in ((64, 8, 2, 0), (8, 64, 1, 0)):
        with pytest.raises(SettingError):
            sizes(*bad)
    with pytest.raises(SettingError):
        parse_size("many")


def test_the_table_counts_wrong_values() -> None:
    rows = [row("all_reduce", 2, "float", "sum", 0, 2, 1e-3, wrong) for wrong in (0, 3)]
    lines = "\n".join(text(rows))
    assert "# Out of bounds values : 3 FAILED" in lines
    assert "busbw" in lines
    found = Found(tuple(rows), {"ranks": 2, "nodes": 2, "backend": "gloo"}, {})
    assert judge(found, None, None) == ["all_reduce of 8 bytes: 3 wrong values"]
    assert conclusion(found, judge(found, None, None)).startswith("failed: all_reduce")


def test_thresholds() -> None:
    rows = (row("all_reduce", 3_000_000, "float", "sum", 0, 2, 1.0, 0),)
    links = {("n1", "n2"): 100e6, ("n10", "n2"): 120e6}
    found = Found(rows, {"ranks": 2, "nodes": 2, "backend": "gloo"}, links)
    assert best(rows, "all_reduce") == pytest.approx(0.012)
    assert share(0.012, 100e6) == pytest.approx(0.96)
    assert judge(found, 0.01, 0.9) == []
    assert len(judge(found, 1.0, 0.99)) == 2
    assert hosts_of(found) == ["n1", "n2", "n10"]
    assert "96% of the slowest link" in conclusion(found, [])


def test_the_picture_says_in_words_what_it_colours() -> None:
    picture = svg(["<a>", "b"], {("<a>", "b"): 2.0}, {("<a>", "b"): "2 Gbit/s"}, "x & y")
    assert "2 Gbit/s" in picture
    assert "&lt;a&gt;" in picture
    assert "x &amp; y" in picture
