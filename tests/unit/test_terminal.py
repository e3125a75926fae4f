"""Tests that untrusted text cannot control a terminal, and that lines are broken between words."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from each_case import each_case
from paceline import cli
from paceline.cli.verbs import setup
from paceline.remote.openssh import Refusal
from paceline.setup import access
from paceline.spec import terminal
from paceline.spec.errors import NodeError
from paceline.spec.hosts import Host
from paceline.spec.terminal import clean, clean_line, wrap

CONTROL_CHARACTERS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


@each_case(
    ("hostile", "shown"),
    [
        ("a\x1b]0;title\x07b", "ab"),
        ("a\x1b]52;c;ZXZpbA==\x1b\\b", "ab"),
        ("a\x1bP+q544e\x1b\\b", "ab"),
        ("a\x1b[2J\x1b[31mb", "ab"),
        ("a\x1b[?1049hb\x1bcc", "abc"),
        ("a\x9b31mb", "ab"),
        ("never \x1b]0;ended", "never \\x1b]0;ended"),
        ("bell\x07 back\x08", "bell\\x07 back\\x08"),
        ("photo\u202egnp.exe", "photo\\u202egnp.exe"),
        ("one\r\ntwo\rthree\tfour", "one\ntwo\\x0dthree\tfour"),
        ("umläut 漢字 🙂", "umläut 漢字 🙂"),
        ("\udce9", "\\udce9"),
    ],
)
def test_clean_removes_or_escapes_control_sequences(hostile: str, shown: str) -> None:
    assert clean(hostile) == shown


@given(st.text(st.characters() | st.sampled_from("\x1b[]0;\x07\x9b\x9d\\mPcH\r\n\u202e")))
def test_clean_text_has_no_control_characters(text: str) -> None:
    assert CONTROL_CHARACTERS.search(clean(text)) is None
    assert (
        CONTROL_CHARACTERS.search(re.sub(r"\x1b\[[0-9;:]*m", "", clean(text, colours=True))) is None
    )
    assert "\n" not in clean_line(text)


def test_plain_text_skips_sequence_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is a fast path: a rank may write 100,000 lines a second."""
    monkeypatch.setattr(terminal, "_SEQUENCE", None)
    assert clean("epoch 1/2  umläut 漢字 🙂", colours=True) == "epoch 1/2  umläut 漢字 🙂"


def test_colours_are_kept_and_reset_at_end() -> None:
    assert clean("\x1b[31mred\x1b[2J", colours=True) == "\x1b[31mred\x1b[0m"
    assert clean("plain", colours=True) == "plain"


@pytest.mark.parametrize(
    "part", ["\x1b", "\x1b[", "\x1b]", "\x1b[1;", "\x9d", "\x1bP", "\r", "\x1b "]
)
def test_cleans_repeated_sequences_fast(part: str) -> None:
    start_s = time.process_time()
    clean(part * (200_000 // len(part)))
    assert time.process_time() - start_s < 10


def test_rendered_error_is_sanitized() -> None:
    error = NodeError("n\x1b]0;x\x07 says", found="\u202eno", remedy="a\x1b[2J")
    assert error.render() == "paceline: n says\n  found:  \\u202eno\n  remedy: a"


def test_wraps_between_words() -> None:
    text = wrap("  remedy: " + "word " * 20 + "a-path/" * 3, 40)
    assert all(len(line) <= 40 for line in text.splitlines())
    assert all(line.startswith(" " * 10) for line in text.splitlines()[1:])
    assert "a-path/a-path/a-path/" in text
    assert wrap("paceline: " + "word " * 10, 40).splitlines()[1].startswith("  word")
    for label in ("epoch 12  ", "warn     ", "unknown  "):
        assert wrap(label + "word " * 10, 40).splitlines()[1].index("word") == len(label)


def test_does_not_wrap_commands() -> None:
    command = "         → sudo ufw allow from 10.77.0.1 to any port 1024:65535 proto tcp"
    assert wrap(command, 40) == command
    assert len(wrap("  remedy: paceline check tells the cases apart, for all hosts", 40)
               .splitlines()) == 2  # fmt: skip


def test_commands_print_only_sanitized_text() -> None:
    """Only JSON, help and text for files go directly to the terminal."""
    plain = re.compile(r"click\.echo\((?!json\.dumps|ctx\.get_help|click\.style|write_hosts|script"
                       r"|markdown|text, nl=False|f\"export|format_for|clean)")  # fmt: skip
    folder = Path(cli.__file__).parent
    violations = [f"{file.name}: {line.strip()}" for file in sorted(folder.rglob("*.py"))
             for line in file.read_text().splitlines() if plain.search(line)]  # fmt: skip
    assert violations == []


def test_setup_output_is_sanitized(capsys: pytest.CaptureFixture[str]) -> None:
    hostile_text = "Permission denied\x1b]0;title\x07 \u202egnp \x9b31m"
    refusal = Refusal("no login", hostile_text, f"ask {hostile_text}")
    setup.show_plan(
        [access.AccessStatus(Host("n1"), "refused", refusal=refusal)], [f"pin {hostile_text}"]
    )
    output = capsys.readouterr().out
    assert "Permission denied" in output
    assert CONTROL_CHARACTERS.search(output) is None
