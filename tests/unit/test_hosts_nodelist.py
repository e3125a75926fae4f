"""Tests the expansion and the compression of Slurm's node lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.hosts.dialect import UnreadableError
from paceline.hosts.nodelist import compress, expand, expand_counts

names = st.from_regex(r"[a-c]{1,2}-?[0-9]{0,4}(-ib[0-9]?)?", fullmatch=True)


@given(st.lists(names, max_size=40))
def test_expand_inverts_compress(hosts: list[str]) -> None:
    assert expand(compress(hosts)) == (hosts or [""])


@given(
    st.integers(0, 1200), st.integers(0, 120), st.integers(1, 5), st.sampled_from(["", "-ib", "x0"])
)
def test_compress_writes_range_in_single_bracket(
    low: int, span: int, width: int, tail: str
) -> None:
    numbers = [str(n).zfill(width) for n in range(low, low + span + 1)]
    text = compress([f"n{number}" for number in numbers])
    assert text == (f"n[{numbers[0]}-{numbers[-1]}]" if span else f"n{numbers[0]}")
    assert expand(f"n[{numbers[0]}-{numbers[-1]}]{tail}") == [f"n{n}{tail}" for n in numbers]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", "n1"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[1-03]", "n1 n2 n3"),
        ("n[001-3]", "n001 n002 n003"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[1,01,001]", "n1 n01 n001"),
        ("a[1-2]b[3-4]c", "a1b3c a1b4c a2b3c a2b4c"),
        ("node[01-02,07],login,gpu-[3]", "node01 node02 node07 login gpu-3"),
        ("10.0.0.[9-11]", "10.0.0.9 10.0.0.10 10.0.0.11"),
    ],
)
def test_expands_node_lists(text: str, hosts: str) -> None:
    assert expand(text) == hosts.split()


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ("n1 n2 n3 n5", "n[1-3,5]"),
        ("n9 n10 n11", "n[9-11]"),
        ("n08 n09 n10", "n[08-10]"),
        ("n3 n1 n2", "n[3,1-2]"),
        ("a1 b1 a2", "a1,b1,a2"),
        ("login n1", "login,n1"),
        ("fd00::1 fd00::2", "fd00::1,fd00::2"),
        ("r1-n1 r1-n2 r2-n1", "r1-n[1-2],r2-n1"),
        ("n1-ib n2-ib", "n1-ib,n2-ib"),
    ],
)
def test_compress_preserves_order(hosts: str, text: str) -> None:
    assert compress(hosts.split()) == text


@pytest.mark.parametrize(
    "text",
    ["n[", "n]", "n[]", "n[1-]", "n[-1]", "n[2-1]", "n[1-2:1]", "n[a-b]", "n[[1]]", "n[1,,2]"],
)
def test_rejects_invalid_node_lists(text: str) -> None:
    with pytest.raises(UnreadableError):
        expand(text)


@pytest.mark.parametrize(
    "text",
    [
        "n[0-65536]",
        "n[0-255][0-256]",
        "n[0-65535,0-65535]",
        "n[" + "0-60000," * 3000 + "1]",
        "a[0-60000],b[0-60000]",
        "n[0-" + "9" * 400 + "]",
    ],
)
def test_rejects_excessive_expansion(text: str) -> None:
    with pytest.raises(UnreadableError):
        expand(text)


def test_expands_counts() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("72") == [72]
    for text in ("", "2(x)", "2(3)", "x", "2,", "1(x999999999)"):
        with pytest.raises(UnreadableError):
            expand_counts(text)
