"""Writes a report's file."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

from paceline.report import story
from paceline.report.page import Page, html
from paceline.report.record import read
from paceline.report.story import Run
from paceline.spec import rundir as names
from paceline.spec.errors import SettingError


def run_in(path: Path) -> Run:
    """The run in a folder, as its report tells it."""
    record = read(path)
    return story.run_of(record, time.time() if record.running else 0.0)


def write(page: Page, out: Path) -> None:
    """Writes the page, whole or not at all, in place of whatever has that name.

    Raises:
        SettingError: It cannot be written there.
    """
    new = out.with_name(f".{out.name}-{secrets.token_hex(8)}")
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(html(page))
        new.replace(out)
    except OSError as error:
        raise SettingError(
            f"cannot write the report {out}",
            found=error.strerror or f"{type(error).__name__}: {error}",
            remedy="--out FILE",
        ) from None
    finally:
        with contextlib.suppress(OSError):
            new.unlink()


def at_end(run: Path) -> str:
    """Writes the report of a run that has just ended, into its folder.

    Returns:
        Why there is none, in one line; empty when it is there. Whatever the files of the run hold,
        the run has ended as it has, so this raises nothing but what interrupts everything.
    """
    try:
        write(story.page_of(run_in(run)), run / names.REPORT)
    except SettingError as error:
        return f"{error.message} ({error.found})"
    except Exception as error:
        return f"cannot make the report of {run}: {type(error).__name__}: {error}"
    return ""
