"""Notifies commands and webhooks of the end of a run (``--notify``).

Errors here do not change the run's outcome, and all notifications together take at most
``TIMEOUT_S``.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit, urlunsplit

from paceline.rundir.directory import Redactor, short
from paceline.spec import jobenv
from paceline.spec.errors import SettingError
from paceline.spec.failure import Result, signal_name
from paceline.spec.formatting import format_duration
from paceline.spec.terminal import clean_line
from paceline.spec.version import __version__

TIMEOUT_S = 30.0
WAITING_NOTE_S = 2.0  # until a note says which notifications are pending
MAX_METRICS_IN_SENTENCE = 6  # the JSON has all
MAX_VARIABLE_CHARS = 32 << 10  # Linux takes 128 KiB, less for all variables together
Outcome = Literal["finished", "failed", "interrupted", "not started"]

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PLAIN_WORD = re.compile(r"[\w./~+@-]+")  # a word without shell syntax


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended.

    Attributes:
        seconds: From the call to the end.
        metrics: The last value of every metric.
        resumable: Whether it was asked to stop and has a checkpoint.
        cause: Of a failure, as `paceline explain` words it; empty if it is not known.
    """

    path: Path
    name: str
    result: Result
    seconds: float
    metrics: Mapping[str, Any] = field(default_factory=dict)
    resumable: bool = False
    secrets: Sequence[str] = field(default=(), repr=False)
    cause: str = ""

    @property
    def outcome(self) -> Outcome:
        if self.result.error:
            return "not started"
        if self.result.interrupted is not None:
            return "interrupted"
        return "failed" if self.result.failure or self.result.exit_code else "finished"

    @property
    def problem(self) -> str:
        """What failed first, or why it was not started, in one line; empty if all went well."""
        if self.result.error:
            return clean_line(self.result.error.splitlines()[0].removeprefix("paceline: "))
        failure = self.result.failure
        return clean_line(self.cause or failure.describe()) if failure else ""

    def sentence(self) -> str:
        """Returns one line for people."""
        duration = f"after {format_duration(self.seconds)}"
        metrics = [*self.metrics.items()][:MAX_METRICS_IN_SENTENCE]
        figures = ", ".join(f"{name} {_format_value(value)}" for name, value in metrics)
        verb = {
            "finished": f"finished {duration}",
            "failed": f"failed {duration} with exit status {self.result.exit_code}",
            "interrupted": f"was stopped by {signal_name(self.result.interrupted or 0)} {duration}",
            "not started": "could not be started",
        }[self.outcome]
        details = self.problem or figures
        name = Path(short(self.path)).name
        return clean_line(f"{name} {verb}{': ' if details else ''}{details}")

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON for a command's standard input and for webhooks."""
        return {
            "text": self.sentence(),
            "run": str(self.path),
            "name": self.name,
            "host": platform.node(),
            "outcome": self.outcome,
            "exit_status": self.result.exit_code,
            "seconds": round(self.seconds, 3),
            "metrics": {key: _json_number(value) for key, value in self.metrics.items()},
            "failure": self.problem or None,
            "resumable": self.resumable,
        }

    def variables(self) -> dict[str, str]:
        """Returns the environment variables for a command."""
        values = self.to_json()
        return {
            jobenv.ENDED_RUN: values["run"],
            jobenv.ENDED_NAME: values["name"],
            jobenv.OUTCOME: values["outcome"],
            jobenv.EXIT_STATUS: str(values["exit_status"]),
            jobenv.SECONDS: str(values["seconds"]),
            jobenv.METRICS: json.dumps(dict(_metrics_that_fit(values["metrics"].items()))),
            jobenv.FIRST_FAILURE: (values["failure"] or "")[:MAX_VARIABLE_CHARS],
            jobenv.SENTENCE: values["text"][:MAX_VARIABLE_CHARS],
        }


def _format_value(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _metrics_that_fit(metrics: Iterable[tuple[str, object]]) -> Iterator[tuple[str, object]]:
    """Yields as many metrics as fit into a variable."""
    remaining = MAX_VARIABLE_CHARS
    for name, value in metrics:
        remaining -= len(json.dumps({name: value}))
        if remaining < 0:
            return
        yield name, value


def _json_number(value: object) -> object:
    """Replaces NaN and infinity, which are no JSON, by ``None``."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- targets --------------------------------------------------------------------------------------


def check(targets: Sequence[str]) -> None:
    """Raises SettingError for a ``--notify`` that is neither a command nor an HTTP address."""
    for target in targets:
        if not target.strip() or not target.replace("\t", " ").isprintable():
            raise SettingError(f"--notify {target!r} is neither a command nor an address",
                               remedy="--notify 'COMMAND', or --notify https://…")  # fmt: skip
        if not _ADDRESS.match(target):
            continue
        try:
            parts = urlsplit(target)
            is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            is_valid = False
        if not is_valid:
            raise SettingError(
                f"--notify {display_target(target)} is not an address that JSON can be posted to",
                found="an address begins with http:// or https:// and the name of a host",
                remedy="--notify https://…",
            )


def missing_programs(targets: Sequence[str]) -> list[str]:
    """Returns warnings about commands that do not exist at the start."""
    return [
        f"paceline: warning: --notify: there is no program {program} here"
        for program in map(_program, targets)
        if program and not _exists(program)
    ]


def _program(target: str) -> str:
    """Returns the program of a simple command; empty for addresses and shell syntax."""
    if _ADDRESS.match(target):
        return ""
    with contextlib.suppress(ValueError):
        program = shlex.split(target)[0]
        if _PLAIN_WORD.fullmatch(program) and target.lstrip().startswith(program):
            return program
    return ""


def _exists(program: str) -> bool:
    """Whether the shell finds a program, or knows the word itself: echo, cd, exec, if."""
    command = ["sh", "-c", 'command -v "$0"', os.path.expanduser(program)]  # noqa: PTH111
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def display_target(target: str) -> str:
    """Returns a target for messages; an address without its path, which may hold a secret."""
    if not _ADDRESS.match(target):
        return clean_line(_program(target) or target[:40])
    scheme, _, address = target.partition("://")
    return clean_line(f"{scheme}://{re.split('[/?#]', address)[0].rpartition('@')[2]}/…")


def secret_addresses(targets: Sequence[str]) -> list[str]:
    """Returns the addresses that files may show only as :func:`display_target` does."""
    parts = {target: urlsplit(target) for target in targets if _ADDRESS.match(target)}
    return [target for target, part in parts.items()
            if "@" in part.netloc or part.path.strip("/") or part.query]  # fmt: skip


# --- notifications --------------------------------------------------------------------------------


def notify_all(targets: Sequence[str], run_end: RunEnd, note: Callable[[str], None],
         timeout_s: float = TIMEOUT_S) -> None:  # fmt: skip
    """Notifies all targets of the end of a run, in parallel.

    Args:
        targets: Commands and addresses, as ``--notify`` takes them.
        note: Takes a warning for each failed notification.
        timeout_s: For all notifications together.
    """
    if not targets:
        return
    redactor, deadline = Redactor(run_end.secrets), time.monotonic() + timeout_s
    text = redactor.whole(json.dumps(run_end.to_json()).encode()).decode() + "\n"
    variables = {name: redactor.text(value) for name, value in run_end.variables().items()}
    notifications = [Notification(target, text, variables, deadline) for target in targets]
    try:
        for notification in notifications:
            notification.thread.start()
        notifications[0].thread.join(WAITING_NOTE_S)
        if pending := [display_target(n.target) for n in notifications if n.thread.is_alive()]:
            note(f"paceline: {run_end.outcome}; waiting for --notify {', '.join(pending)}")
        for notification in notifications:  # each ends by itself before its thread's time-out
            notification.thread.join(max(0.0, deadline - time.monotonic()) + 1.0)
    except KeyboardInterrupt:
        for notification in notifications:
            notification.kill()
        note("paceline: warning: --notify was given up at Ctrl-C")
        return
    for notification in notifications:
        target, problem = display_target(notification.target), notification.problem
        if notification.thread.is_alive():
            problem = f"no answer in {timeout_s:g} s"
        if problem:
            note(f"paceline: warning: --notify {target}: {redactor.text(problem)}")


class Notification:
    """One notification, in a thread of its own because a name lookup may block.

    Attributes:
        problem: The error; empty if there was none.
    """

    def __init__(self, target: str, text: str, variables: Mapping[str, str],
                 deadline: float) -> None:  # fmt: skip
        self.target = target
        self.problem = ""
        self.thread = threading.Thread(target=self._send, name="notify", daemon=True)
        self._text = text
        self._variables = variables
        self._deadline = deadline
        self._process: subprocess.Popen[str] | None = None

    def _send(self) -> None:
        try:
            if _ADDRESS.match(self.target):
                self.problem = self._post()
            else:
                self._run()
        except (OSError, ValueError) as error:
            self.problem = clean_line(str(error) or type(error).__name__)

    def _remaining_s(self) -> float:
        return max(0.1, self._deadline - time.monotonic())

    def _run(self) -> None:
        """Runs the command in a shell, with its output on standard error."""
        self._process = process = subprocess.Popen(
            ["sh", "-c", self.target], text=True, stdin=subprocess.PIPE, stdout=2,
            env={**os.environ, **self._variables}, start_new_session=True,
        )  # fmt: skip
        started_at = time.monotonic()
        try:
            process.communicate(self._text, timeout=self._remaining_s())
        except subprocess.TimeoutExpired:
            self.kill()
            self.problem = f"it was ended after {time.monotonic() - started_at:.0f} s"
            return
        if process.returncode < 0:
            self.problem = f"it was ended by {signal_name(-process.returncode)}"
        elif process.returncode:
            self.problem = f"it ended with exit status {process.returncode}"

    def kill(self) -> None:
        """Kills the command's process group."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _post(self) -> str:
        """Posts the JSON; returns the error, empty if there was none."""
        import http.client  # imported late: they cost 20 ms
        import urllib.error
        import urllib.request

        class NoRedirects(urllib.request.HTTPRedirectHandler):
            """Follows no redirect, which would drop the posted body."""

            def redirect_request(self, *_: Any) -> None:
                return None

        parts = urlsplit(self.target)
        headers = {"Content-Type": "application/json", "User-Agent": f"paceline/{__version__}"}
        user, at, place = parts.netloc.rpartition("@")
        if at:  # as curl does
            coded = base64.b64encode(unquote(user).encode()).decode()
            headers["Authorization"] = f"Basic {coded}"
        url = urlunsplit(parts._replace(netloc=place, fragment=""))
        request = urllib.request.Request(url, self._text.encode(), headers)  # noqa: S310
        opener = urllib.request.build_opener(NoRedirects)
        try:
            with opener.open(request, timeout=self._remaining_s()) as answer:
                answer.read(1)
        except urllib.error.HTTPError as error:
            error.close()
            location = error.headers.get("Location", "") if 300 <= error.code < 400 else ""
            redirect = f", and it leads to {display_target(location)}" if location else ""
            return clean_line(f"the answer was {error.code} {error.reason}{redirect}")
        except urllib.error.URLError as error:
            return clean_line(str(error.reason))
        except http.client.HTTPException as error:
            return clean_line(f"no answer of HTTP: {error!r}")
        return ""
