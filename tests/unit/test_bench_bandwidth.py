"""Tests the bandwidth benchmark against results calculated by hand and against nccl-tests."""

from __future__ import annotations

import ast
from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench import bandwidth
from paceline.bench.bandwidth import (
    COLLECTIVES,
    TYPES,
    bus_factor,
    elements,
    format_rows,
    make_row,
    parse_size,
    peak_bandwidth,
    share,
    sizes,
)
from paceline.bench.link_rates import (
    HostRates,
    LinkRates,
    Pair,
    measure_rates,
    nominal_rates,
    num_turns,
    peer,
    slot_rate,
    verdict,
)
from paceline.cli.verbs.bench.collectives import (
    Measurements,
    conclusion,
    find_problems,
    hosts_of,
    limits,
)
from paceline.report.heatmap import svg
from paceline.spec.errors import SettingError

# 1 GB in 0.1 s on 4 ranks: 10 GB/s, times the factor of nccl-tests' PERFORMANCE.md
BY_HAND = {"all_reduce": 15.0, "all_gather": 7.5, "reduce_scatter": 7.5, "broadcast": 10.0,
           "reduce": 10.0, "alltoall": 7.5, "sendrecv": 10.0}  # fmt: skip


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_bus_bandwidth_matches_hand_calculation(collective: str) -> None:
    result = make_row(collective, 250_000_000, "float", "sum", 0, 4, 0.1, 0)
    assert result.algbw == pytest.approx(10.0)
    assert result.busbw == pytest.approx(BY_HAND[collective])
    assert result.time_us == pytest.approx(100_000)


def test_bus_factor_is_zero_for_single_rank() -> None:
    assert bus_factor("all_reduce", 1) == 0
    assert bus_factor("all_gather", 1) == 0


@given(st.sampled_from(COLLECTIVES), st.integers(1, 1 << 20), st.sampled_from(sorted(TYPES)),
       st.integers(1, 64))  # fmt: skip
def test_buffers_are_divisible_by_ranks(collective: str, size: int, kind: str, ranks: int) -> None:
    count = elements(collective, size, TYPES[kind], ranks)
    assert count >= 1
    if collective in ("all_gather", "reduce_scatter", "alltoall"):
        assert count % ranks == 0


def test_parses_sizes_and_rejects_invalid_ranges() -> None:
    assert sizes(8, 64, 2, 0) == [8, 16, 32, 64]
    assert sizes(8, 20, 2, 5) == [8, 13, 18]
    assert [parse_size(text) for text in ("8", "64K", "2m", "1GiB")] == [8, 65536, 2 << 20, 1 << 30]
    for invalid_args in ((64, 8, 2, 0), (8, 64, 1, 0)):
        with pytest.raises(SettingError):
            sizes(*invalid_args)
    with pytest.raises(SettingError):
        parse_size("many")


def test_table_reports_wrong_values() -> None:
    rows = [make_row("all_reduce", 2, "float", "sum", 0, 2, 1e-3, wrong) for wrong in (0, 3)]
    lines = "\n".join(format_rows(rows))
    assert "# Out of bounds values : 3 FAILED" in lines
    assert "busbw" in lines
    measurements = Measurements(tuple(rows), {"ranks": 2, "nodes": 2, "backend": "gloo"}, {})
    assert find_problems(measurements, None, None) == ["all_reduce of 8 bytes: 3 wrong values"]
    assert conclusion(measurements, find_problems(measurements, None, None)).startswith(
        "failed: all_reduce"
    )


def test_thresholds_apply_to_bandwidth_and_link_share() -> None:
    rows = (make_row("all_reduce", 3_000_000, "float", "sum", 0, 2, 1.0, 0),)
    links = {("n1", "n2"): 100e6, ("n10", "n2"): 120e6}
    measurements = Measurements(rows, {"ranks": 2, "nodes": 2, "backend": "gloo"}, links)
    assert peak_bandwidth(rows, "all_reduce") == pytest.approx(0.012)
    assert share(0.012, 100e6) == pytest.approx(0.96)
    assert find_problems(measurements, 0.01, 0.9) == []
    assert len(find_problems(measurements, 1.0, 0.99)) == 2
    assert hosts_of(measurements) == ["n1", "n2", "n10"]
    assert "96% of the slowest link" in conclusion(measurements, [])


# output of nccl-tests 2.13 on 72 GPUs (coreweave/nccl-tests 43)
NCCL_TESTS = """
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
   536870912     134217728     float     sum      -1   1806.7  297.16  586.06      0   1835.9  292.43  576.74      0
  4294967296    1073741824     float     sum      -1    10094  425.49  839.16      0    10141  423.54  835.32      0
"""  # noqa: E501


def test_table_matches_nccl_tests() -> None:
    """Programs that read the output of nccl-tests find the same values in the same columns."""
    expected_lines = NCCL_TESTS.strip().splitlines()
    rows = [
        make_row("all_reduce", 134217728, "float", "sum", 0, 72, 1806.68e-6, 0, (1835.90e-6, 0)),
        make_row("all_reduce", 1073741824, "float", "sum", 0, 72, 10094.2e-6, 0, (10140.58e-6, 0)),
    ]
    table_lines = [line for line in format_rows(rows) if line[:3] not in ("# a", "# O", "# A", "#")]
    sides, names, units, *lines = expected_lines
    assert table_lines[1:3] == [names, units]
    assert table_lines[0].split() == sides.split()
    assert table_lines[3:5] == lines
    assert format_rows(rows)[-3:-1] == [f"# Avg bus bandwidth    : {709.319:g}", "#"]


def test_alltoall_row_has_no_in_place_values() -> None:
    (line,) = [row for row in format_rows([make_row("alltoall", 8, "float", "sum", 0, 2, 1e-5, 0)])
               if row.endswith("N/A")]  # fmt: skip
    assert line.split() == ["32", "8", "float", "none", "-1", "10.00", "0.0032", "0.0016", "0",
                            *["N/A"] * 4]  # fmt: skip


@pytest.mark.parametrize("nodes", range(1, 12))
def test_peer_schedule_covers_pairs_exactly_once(nodes: int) -> None:
    scheduled_pairs = []
    for turn in range(num_turns(nodes)):
        for node in range(nodes):
            partner = peer(node, turn, nodes)
            assert partner is None or peer(partner, turn, nodes) == node != partner
            scheduled_pairs += [(node, partner)] if partner is not None and node < partner else []
    assert sorted(scheduled_pairs) == [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]


def make_link_rates(copies: dict[str, float], **slow: float) -> LinkRates:
    """Returns links with a rate of 100, except between the named hosts or of a named host."""
    names = list(copies)
    rates = {(a, b): 100.0 for a in names for b in names}
    for pair in rates:
        for name, rate in slow.items():
            if set(name.split("_")) <= set(pair):
                rates[pair] = rate
    return LinkRates(tuple(HostRates(name, "CPU", copy) for name, copy in copies.items()), rates)


EVEN = {"n1": 10.0, "n2": 11.0, "n3": 9.0, "n4": 10.0}


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (make_link_rates(EVEN), []),
        (make_link_rates(EVEN, n3=20.0), ["n3 is slow: its best link carries"]),
        (make_link_rates(EVEN, n1_n2=20.0), ["the link n1→n2 is slow", "the link n2→n1 is slow"]),
        (make_link_rates({**EVEN, "n2": 3.0}), ["n2 itself is slow: it copies its memory at"]),
        (make_link_rates({"n1": 10.0, "n2": 3.0}, n1_n2=7.0), ["n2 itself is slow"]),
        (make_link_rates({"n1": 10.0}), []),
        (LinkRates(), []),
    ],
)
def test_verdict_names_slow_host_or_link(result: LinkRates, text: list[str]) -> None:
    verdicts = verdict(result)
    assert len(verdicts) == len(text)
    for message, start in zip(verdicts, text, strict=True):
        assert message.startswith(start)
    assert LinkRates.from_json(result.to_json()) == result


@pytest.mark.parametrize(("second", "slow"), [(0.9e9, 0), (0.2e9, 1)])
def test_slow_links_are_remeasured(second: float, slow: int) -> None:
    """A busy host can slow down a short measurement of a healthy link."""
    requested_pairs: list[Collection[Pair] | None] = []

    def measure(pairs: Collection[Pair] | None) -> dict[Pair, float]:
        requested_pairs.append(pairs)
        if pairs is None:
            return {("n1", "n2"): 0.3e9, ("n2", "n1"): 1e9}
        return {("n1", "n2"): second, ("n2", "n1"): 0.1e9}

    rates = measure_rates(measure)
    assert rates["n2", "n1"] == 1e9
    assert requested_pairs[:2] == [None, [("n1", "n2")]]
    assert len(verdict(LinkRates((), rates))) == slow


def test_conclusion_omits_share_above_tcp_rate() -> None:
    rows = (make_row("all_reduce", 3_000_000, "float", "sum", 0, 2, 1.0, 0),)
    measurements = Measurements(
        rows, {"ranks": 2, "nodes": 2, "backend": "gloo"}, {("n1", "n2"): 50e6}
    )
    assert "%" not in conclusion(measurements, [])
    assert "more than TCP reached" in conclusion(measurements, [])


def test_verdict_omits_hosts_reported_by_tcp() -> None:
    assert verdict(make_link_rates(EVEN, n3=20.0), known_slow=("n3",)) == ()
    assert len(verdict(make_link_rates({**EVEN, "n2": 3.0}, n3=20.0), known_slow=("n3",))) == 1


def test_nominal_rates_of_slot_wire_and_card() -> None:
    assert slot_rate("16.0 GT/s PCIe x16") == pytest.approx(31.5e9, rel=0.001)
    assert slot_rate("8.0 GT/s PCIe x8") == pytest.approx(7.88e9, rel=0.001)
    assert slot_rate("5.0 GT/s PCIe x16") == pytest.approx(8e9)
    assert slot_rate("Unknown") == 0
    card = {"active": True, "speed": 100000}
    link = {"name": "eth0", "speed": 1000}
    plan = {"nodes": [{"host": host, "interface": "eth0"} for host in ("n1", "n2", "n3")]}
    facts = {"n1": {"interfaces": [link], "rdma": [card]}, "n2": {"interfaces": [link]},
             "n3": {"interfaces": [{**link, "speed": -1}], "rdma": None}}  # fmt: skip
    assert nominal_rates(plan, facts) == {"n1": 1e11, "n2": 1e9}
    rows = (make_row("all_reduce", 25_000_000, "float", "sum", 0, 2, 1.0, 0),)
    host_rates = HostRates("n1", "A100", 1e12, 24e9, "16.0 GT/s PCIe x16")
    measurements = Measurements(
        rows, {"ranks": 2, "nodes": 2}, {}, ways=LinkRates((host_rates,)), wires={"n1": 1e9}
    )
    assert limits(measurements) == [
        "n1: A100: wire 0.125 GB/s, copies 1e+03 GB/s in memory, feeds its card 24 GB/s of "
        "31.5 GB/s (16.0 GT/s PCIe x16)",
        "all_reduce uses 80% of the slowest wire on the bus",
    ]


def test_heatmap_contains_values_as_escaped_text() -> None:
    image = svg(["<a>", "b"], {("<a>", "b"): 2.0}, {("<a>", "b"): "2 Gbit/s"}, "x & y")
    assert "2 Gbit/s" in image
    assert "&lt;a&gt;" in image
    assert "x &amp; y" in image


def test_collectives_job_imports_only_sent_modules() -> None:
    """A host without the package gets only these modules."""
    package, sent = Path(bandwidth.__file__).parents[1], bandwidth.PARTS
    seen, pending = set(), ["paceline.bench.collectives_job"]
    while pending:
        name = pending.pop()
        folder, *submodules = name.split(".")[1:]
        assert folder in sent or f"{folder}.py" in sent, name
        file = package.joinpath(folder, *submodules).with_suffix(".py")
        if file in seen or not file.exists():  # an import of a package
            continue
        seen.add(file)
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline"):
                module = str(node.module)
                at_top = module == "paceline"
                pending += [f"{module}.{row.name}" for row in node.names] if at_top else [module]
    assert len(seen) > 5
