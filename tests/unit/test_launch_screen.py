"""Tests terminal output: complete labelled lines, no secrets, and no blocking."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.launch.terminal import screen as screen_module
from paceline.launch.terminal.screen import (
    MAX_ERROR_CHARS,
    MAX_ERRORS,
    REDRAW_S,
    LineSplitter,
    Screen,
)
from paceline.launch.terminal.writer import BackgroundWriter
from paceline.progress import describe
from paceline.spec.job import Show


@given(st.lists(st.binary(max_size=30).filter(lambda b: b"\n" not in b and b"\r" not in b)),
       st.lists(st.integers(0), max_size=8))  # fmt: skip
def test_splits_lines_across_chunks(expected: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(line + b"\n" for line in expected)
    lines, split = LineSplitter(), []
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    for start, end in itertools.pairwise(edges):
        split += lines.feed(stream[start:end], 0.0)
    assert split + lines.flush() == expected


def test_crlf_and_unterminated_line() -> None:
    lines = LineSplitter()
    assert lines.feed(b"a\r\nb", 0.0) == [b"a"]
    assert lines.flush() == [b"b"]
    assert lines.flush() == []


def test_redrawn_line_is_rate_limited() -> None:
    lines = LineSplitter()
    assert lines.feed(b"10%\r20%\r", 100.0) == [b"20%"]
    assert lines.feed(b"30%\r", 101.0) == []
    assert lines.feed(b"40%\r", 100.1 + REDRAW_S) == [b"40%"]
    assert lines.feed(b"100%\n", 200.0) == [b"100%"]


def test_endless_line_is_flushed() -> None:
    lines = LineSplitter()
    assert sum(map(len, lines.feed(b"x" * 100_000, 0.0))) == 100_000


def captured(show: Show) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    screen = Screen(show, out, err)
    screen.output("n1", 0, "out", b"one\npart")
    screen.output("n2", 1, "err", "zwei ü \udc80\n".encode(errors="surrogateescape"))
    screen.print("said")
    screen.note("noted")
    screen.close()
    return out.getvalue(), err.getvalue()


def test_show_all_labels_lines() -> None:
    out, err = captured("all")
    assert out == "[n1/0] one\nsaid\n[n1/0] part\n"
    assert err == "[n2/1] zwei ü \ufffd\nnoted\n"


def test_show_rank0_or_none() -> None:
    assert captured("rank0") == ("[n1/0] one\nsaid\n[n1/0] part\n", "noted\n")
    assert captured("none") == ("said\n", "noted\n")


def test_mute_hides_stderr_of_rank() -> None:
    out, err = io.StringIO(), io.StringIO()
    screen = Screen("all", out, err)
    screen.mute("n1", 0)
    screen.output("n1", 0, "err", b"Traceback\n")
    screen.output("n1", 0, "out", b"still\n")
    screen.close()
    assert (out.getvalue(), err.getvalue()) == ("[n1/0] still\n", "")


def test_hides_torch_stack_frames() -> None:
    err = io.StringIO()
    screen = Screen("all", io.StringIO(), err)
    torch_warning = (
        "[W1123 10:46:08.93 TCPStore.cpp:138] [c10d] recvValue failed: the peer may have crashed"
    )
    frames = (
        "Exception raised from recvBytes at /pytorch/c10d/Utils.hpp:787 (most recent call first):",
        "frame #0: c10::Error::Error(std::string) + 0x9d (0x7fd4b291bb8d in /lib/libc10.so)",
        "frame #53: _start + 0x21 (0x55ba93aaa081 in python train.py [rank 1 of 3] n2)",
    )
    user_line = "frame #3: of the video is dark"
    screen.output("n1", 0, "err", "\n".join([torch_warning, *frames, user_line, ""]).encode())
    screen.close()
    assert err.getvalue() == f"[n1/0] {torch_warning}\n[n1/0] {user_line}\n"


def test_writes_received_lines_in_single_call(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(BackgroundWriter, "write", lambda _, text: written.append(text))
    screen = Screen("all", io.StringIO(), io.StringIO())
    screen.output("n1", 0, "out", b"one\ntwo\nthree\npart")
    assert written == ["[n1/0] one\n[n1/0] two\n[n1/0] three\n"]


def test_progress_in_plain_lines() -> None:
    err = io.StringIO()
    screen = Screen("all", io.StringIO(), err)
    for step in range(3):  # fewer lines than steps
        screen.progress({"step": step, "steps": 3, "epoch": 1, "epochs": 2, "loss": 0.5})
    screen.close()
    assert err.getvalue() == "epoch 2/2  step 0/3  loss 0.5000\n"
    assert describe({"samples_per_s": 1234.5}) == "1,234 samples/s"


# --- writers


@pytest.fixture
def pipe() -> Iterator[tuple[int, io.TextIOWrapper]]:
    read, write = os.pipe()
    file = os.fdopen(write, "w")
    yield read, file
    for close in (lambda: os.close(read), file.close):
        try:
            close()
        except OSError:
            continue


def test_writer_does_not_block_on_unread_pipe(pipe: tuple[int, io.TextIOWrapper]) -> None:
    read, file = pipe
    writer = BackgroundWriter(file, limit=100_000)
    for number in range(10_000):
        writer.write(f"line {number} {'x' * 80}\n")
    data = b""
    os.set_blocking(read, False)
    closing = threading.Thread(target=writer.close)
    closing.start()
    while closing.is_alive():
        try:
            data += os.read(read, 1 << 16)
        except BlockingIOError:
            continue
    closing.join()
    with contextlib.suppress(BlockingIOError):
        data += os.read(read, 1 << 20)
    text = data.decode()
    num_written = text.count("line ")
    assert text.startswith("line 0 ")
    assert 0 < num_written < 10_000
    numbers = re.findall(r"([\d,]+) lines? left out", text)
    assert sum(int(number.replace(",", "")) for number in numbers) == 10_000 - num_written


def test_writer_survives_closed_reader(pipe: tuple[int, io.TextIOWrapper]) -> None:
    read, file = pipe
    writer = BackgroundWriter(file)
    os.close(read)
    writer.write("one\n")
    writer.close()
    writer.write("two\n")
    writer.close()
    file.flush()  # like the interpreter at exit


def test_replaces_unencodable_characters(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as file:
        writer = BackgroundWriter(file)
        writer.write("ü \udc80\n")
        writer.close()
    assert (tmp_path / "out").read_text() == "? ?\n"


def test_close_twice_without_writes() -> None:
    writer = BackgroundWriter(io.StringIO())
    writer.close()
    writer.close()


# --- the start


@pytest.fixture(autouse=True)
def terminal_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.mark.parametrize(
    ("variables", "escapes"),
    [({}, True), ({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_colours_need_capable_terminal(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], escapes: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    out = Terminal()
    screen = Screen(out=out, err=io.StringIO())
    screen.output("n1", 0, "out", b"\x1b[31mred\x1b[0m\n")
    screen.close()
    assert ("\x1b" in out.getvalue()) == escapes
    assert "red" in out.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_print_wraps_lines_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    message = (
        "epoch 2  step 66/66  train: accuracy 0.9317, loss 0.2299  test: accuracy 0.94, loss 0.2"
    )
    for out in (Terminal(), io.StringIO()):
        screen = Screen("all", out, out)
        screen.print(message)
        screen.close()
        unwrapped = out.getvalue().replace("\n         ", " ").rstrip()
        assert unwrapped == message
        assert (max(map(len, out.getvalue().splitlines())) <= 80) == out.isatty()


def test_start_progress_is_transient_line() -> None:
    out = Terminal()
    screen = Screen("all", out, out)
    screen.starting("connecting", 0, 3)
    screen.starting("connecting", 3, 3)
    screen.starting("importing torch", 2, 3)
    screen.started()
    screen.note("paceline: 3 ranks")
    screen.close()
    captured = out.getvalue().replace("\r\x1b[2K", "|")
    assert captured == (
        "|paceline: connecting 0/3 …|paceline: connecting 3/3 …"
        "|paceline: connecting 3/3 · importing torch 2/3 …|paceline: 3 ranks\n"
    )


def test_start_progress_without_terminal_shows_slow_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen_module, "LOG_START_S", 0.02)
    err = io.StringIO()

    async def start() -> None:
        screen = Screen("all", io.StringIO(), err)
        screen.starting("connecting", 0, 2)
        screen.starting("connecting", 2, 2)
        screen.starting("importing torch", 1, 2)
        await asyncio.sleep(0.2)
        screen.started()
        screen.close()

    asyncio.run(start())
    assert err.getvalue() == "paceline: importing torch (1 of 2 hosts so far)\n"


def test_hides_harmless_warnings() -> None:
    err = io.StringIO()
    screen = Screen("all", io.StringIO(), err)
    screen.output("n1", 0, "err", b"[W1122 00:10:11.1 socket.cpp:207] [c10d] The hostname of the "
                  b"client socket cannot be retrieved. err=-3\nreal trouble\n")  # fmt: skip
    screen.close()
    assert err.getvalue() == "[n1/0] real trouble\n"


def test_prints_paceline_error_of_single_rank() -> None:
    err = io.StringIO()
    screen = Screen("all", io.StringIO(), err)
    for rank in range(3):
        screen.output("n1", rank, "err", b"paceline: no data\n  found:  a\n  remedy: b\n")
        screen.output("n1", rank, "err", b"by %d\n" % rank)
    screen.close()
    assert err.getvalue() == (
        "[n1/0] paceline: no data\n[n1/0]   found:  a\n[n1/0]   remedy: b\n"
        "[n1/0] by 0\n[n1/1] by 1\n[n1/2] by 2\n"
    )


def test_prints_paceline_error_again_in_next_attempt() -> None:
    err = io.StringIO()
    screen = Screen("all", io.StringIO(), err)
    for _ in range(2):
        for rank in range(2):
            screen.output("n1", rank, "err", b"paceline: no data\n  found:  a\n")
        screen.end_attempt()
    screen.close()
    assert err.getvalue() == 2 * "[n1/0] paceline: no data\n[n1/0]   found:  a\n"


def test_maps_shipped_paths_to_user_paths() -> None:
    err = io.StringIO()
    screen = Screen("all", io.StringIO(), err)
    screen.shipped_copies.append(("n2", "/root/.cache/paceline/trees/ab", "/home/me/project"))
    line = b'  File "/root/.cache/paceline/trees/ab/train.py", line 3\n'
    screen.output("n2", 1, "err", line)
    screen.output("n1", 0, "err", line)
    screen.close()
    own, other = err.getvalue().splitlines()
    assert own == '[n2/1]   File "/home/me/project/train.py", line 3'
    assert ".cache" in other


@pytest.mark.parametrize("terminal", [False, True])
def test_strips_terminal_control_sequences(terminal: bool) -> None:
    out = Terminal() if terminal else io.StringIO()
    screen = Screen("all", out, out)
    screen.output("n\x1b]0;x\x07", 0, "out", b"\x1b]52;c;eA==\x07a\x1b[31mred\x1b[2J\xe2\x80\xae\n")
    screen.note("agent \x1b]0;x\x07 says")
    screen.close()
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert {*text.splitlines()} == {"[n/0] ared\\u202e", "agent  says"}  # in any order
    assert ("\x1b[31mred" in out.getvalue()) is terminal
    assert not terminal or "\\u202e\x1b[0m\n" in out.getvalue()


def test_is_visible_for_recent_output() -> None:
    screen = Screen("all", io.StringIO(), io.StringIO())
    screen.output("n1", 0, "err", b"last words\n")
    assert screen.is_visible("n1", 0)
    assert not screen.is_visible("n1", 1)
    for _ in range(40):
        screen.note("something else")
    assert not screen.is_visible("n1", 0)
    screen.close()


def test_progress_bar_keeps_only_latest_state() -> None:
    lines = LineSplitter()
    assert lines.feed(b"\rstep 0", 0.0) == [b"step 0"]
    for step in range(1, 20_000):
        assert lines.feed(b"\rstep %d" % step, 1.0) == []
    assert lines.flush() == [b"step 19999"]
    assert lines.feed(b"step 1\r", 2.0) + lines.feed(b"step 2\r", 3.0) == []
    assert lines.flush() == [b"step 2"]


def test_errors_in_memory_are_bounded() -> None:
    screen = Screen(out=io.StringIO(), err=io.StringIO())
    for number in range(2 * MAX_ERRORS):
        screen._is_repeated("n1", 0, f"paceline: {number}" + "x" * 2 * MAX_ERROR_CHARS)
    assert len(screen._errors) == MAX_ERRORS
    assert max(map(len, screen._errors)) == MAX_ERROR_CHARS
    screen.close()
