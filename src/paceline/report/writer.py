"""Writes the report of a run as a file."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

from paceline.report import run_page
from paceline.report.page import Page, html
from paceline.report.record import read
from paceline.report.run import Run, make_run
from paceline.spec import rundir as names
from paceline.spec.errors import SettingError


def read_run(path: Path) -> Run:
    record = read(path)
    return make_run(record, time.time() if record.is_running else 0.0)


def write(page: Page, out: Path) -> None:
    write_text(html(page), out, f"cannot write the report {out}", "--out FILE")


def write_text(text: str, out: Path, message: str, remedy: str) -> None:
    """Writes a file atomically, in place of whatever file, link or pipe has that name.

    Raises:
        SettingError: It cannot be written there; has the message and remedy.
    """
    temporary = out.with_name(f".{out.name}-{secrets.token_hex(8)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(out)
    except OSError as error:
        reason = error.strerror or f"{type(error).__name__}: {error}"
        raise SettingError(message, found=reason, remedy=remedy) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_at_end(run: Path) -> str:
    """Writes the report of a run that has just ended into its folder.

    Returns:
        Why there is no report, in one line; empty if it was written. Errors are returned, not
        raised, because the run's result does not depend on its report.
    """
    try:
        write(run_page.build_page(read_run(run)), run / names.REPORT)
    except SettingError as error:
        return f"{error.message} ({error.found})"
    except Exception as error:
        return f"cannot make the report of {run}: {type(error).__name__}: {error}"
    return ""
