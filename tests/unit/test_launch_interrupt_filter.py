"""Tests that only tracebacks of KeyboardInterrupt are removed from an error stream."""

from __future__ import annotations

import pytest

from paceline.launch.terminal.interrupt_filter import MAX_LINES, InterruptFilter

FRAMES = 'Traceback (most recent call last):\n  File "train.py", line 12, in <module>\n    loop()\n'
CHAIN = "\nDuring handling of the above exception, another exception occurred:\n\n"
INTERRUPT = f"{FRAMES}KeyboardInterrupt"
PREFIXED = "\n".join(f"[rank1]: {line}" for line in INTERRUPT.split("\n"))
FAILURE = f"{FRAMES}RuntimeError: no space\n  left on the device"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (INTERRUPT, ""),
        (f"{FRAMES}RuntimeError: Connection closed by peer\n{CHAIN}{INTERRUPT}", ""),
        (f"Process ForkPoolWorker-1:\n{INTERRUPT}", ""),
        (PREFIXED, ""),
        (f"Exception ignored in: <function finish at 0x7f>\n{INTERRUPT}", ""),
        (f"15/1000 [00:00<00:09]{INTERRUPT}", "15/1000 [00:00<00:09]"),
        (FAILURE, FAILURE),
        (f"{FAILURE}\n{FAILURE}", f"{FAILURE}\n{FAILURE}"),
        (f"{INTERRUPT}\n{FAILURE}", FAILURE),
        (f"saving\n{INTERRUPT}\nsaved", "saving\nsaved"),
        ("KeyboardInterrupt: a line of the script\n  indented", None),
        (f"{FRAMES}OSError: a\nb\nKeyboardInterrupt", None),
        (FRAMES.strip(), None),
    ],
)
def test_only_interrupts_are_removed(text: str, expected: str | None) -> None:
    interrupt_filter = InterruptFilter()
    visible = [
        line for part in text.encode().split(b"\n") for line in interrupt_filter.feed([part])
    ]
    visible += interrupt_filter.flush()
    assert b"\n".join(visible).decode() == (text if expected is None else expected)


def test_endless_traceback_is_shown() -> None:
    lines = [FRAMES.split("\n")[0].encode(), *[b"  frame"] * (MAX_LINES + 9)]
    assert InterruptFilter().feed(lines) == lines
