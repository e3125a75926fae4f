"""Tests parsing the bytes that a terminal sends for keys."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.launch.terminal.keys import Keys, in_foreground, parse_keys


@pytest.mark.parametrize(
    ("sent", "keys"),
    [
        ("s", ["s"]),
        ("12\r", ["1", "2", "enter"]),
        ("\x1b[A\x1b[B\x1bOA", ["up", "down", "up"]),
        ("\x1b", ["escape"]),
        ("\x1b[5~\x1b[6~", ["page up", "page down"]),
        ("\x1b[1;5Cx", ["x"]),  # Ctrl-Right is ignored
        ("\x01\x7f", ["backspace"]),
        ("\x1b[", []),
    ],
)
def test_parse_keys(sent: str, keys: list[str]) -> None:
    assert list(parse_keys(sent)) == keys


@given(st.text())
def test_parsed_keys_are_printable(sent: str) -> None:
    assert all(key and key.isprintable() for key in parse_keys(sent))


def test_keys_do_not_start_without_terminal() -> None:
    read, write = os.pipe()
    try:
        keys = Keys(lambda key: None, read)
        assert not in_foreground(read)
        assert not keys.start()
        assert not keys.is_open
        keys.close()
    finally:
        os.close(read)
        os.close(write)
