"""Told when it is over: commands and addresses that hear how a run ended (``--notify``).

Nothing that goes wrong here changes how the run ended, and nobody is waited for longer than
``PATIENCE_S``, all of them together.
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
import shutil
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

PATIENCE_S = 30.0
SOON_S = 2.0  # for those who watch it is said after this long what is waited for
FIGURES = 6  # in the sentence; the JSON has all
MOST = 32 << 10  # characters of a variable: Linux takes 128 KiB, and less of all together
Outcome = Literal["finished", "failed", "interrupted", "not started"]

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PLAIN = re.compile(r"[\w./~+@-]+")  # a word that a shell takes as it is


@dataclass(frozen=True, slots=True)
class Ended:
    """What there is to be told of a run.

    Attributes:
        path: The run directory.
        name: The run's name.
        result: How it ended.
        seconds: From the call to the end.
        metrics: The last value of every metric.
        resumable: It was asked to stop, and there is a checkpoint of it.
        secrets: Values that nobody is told.
    """

    path: Path
    name: str
    result: Result
    seconds: float
    metrics: Mapping[str, Any] = field(default_factory=dict)
    resumable: bool = False
    secrets: Sequence[str] = field(default=(), repr=False)

    @property
    def outcome(self) -> Outcome:
        if self.result.error:
            return "not started"
        if self.result.interrupted is not None:
            return "interrupted"
        return "failed" if self.result.failure or self.result.exit_code else "finished"

    @property
    def why(self) -> str:
        """The first failure, or why it was not started: one line, and empty where all went well."""
        if self.result.error:
            return clean_line(self.result.error.splitlines()[0].removeprefix("paceline: "))
        return clean_line(self.result.failure.describe()) if self.result.failure else ""

    def sentence(self) -> str:
        """All of it for a person, in one line."""
        took = f"after {format_duration(self.seconds)}"
        figures = ", ".join(f"{key} {_shown(v)}" for key, v in [*self.metrics.items()][:FIGURES])
        said = {
            "finished": f"finished {took}",
            "failed": f"failed {took} with exit status {self.result.exit_code}",
            "interrupted": f"was stopped by {signal_name(self.result.interrupted or 0)} {took}",
            "not started": "could not be started",
        }[self.outcome]
        more = self.why or figures
        name = Path(short(self.path)).name  # on a supervisor's host the folder is one of many
        return clean_line(f"{name} {said}{': ' if more else ''}{more}")

    def to_json(self) -> dict[str, Any]:
        """What standard input of a command holds, and what is posted."""
        return {
            "text": self.sentence(),
            "run": str(self.path),
            "name": self.name,
            "host": platform.node(),
            "outcome": self.outcome,
            "exit_status": self.result.exit_code,
            "seconds": round(self.seconds, 3),
            "metrics": {key: _number(value) for key, value in self.metrics.items()},
            "failure": self.why or None,
            "resumable": self.resumable,
        }

    def variables(self) -> dict[str, str]:
        """The same for a command's environment."""
        values = self.to_json()
        return {
            jobenv.ENDED_RUN: values["run"],
            jobenv.ENDED_NAME: values["name"],
            jobenv.OUTCOME: values["outcome"],
            jobenv.EXIT_STATUS: str(values["exit_status"]),
            jobenv.SECONDS: str(values["seconds"]),
            jobenv.METRICS: json.dumps(dict(_first(values["metrics"].items()))),
            jobenv.FIRST_FAILURE: (values["failure"] or "")[:MOST],
            jobenv.SENTENCE: values["text"][:MOST],
        }


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _first(figures: Iterable[tuple[str, object]]) -> Iterator[tuple[str, object]]:
    """As many as a variable has room for."""
    room = MOST
    for name, value in figures:
        room -= len(json.dumps({name: value}))
        if room < 0:
            return
        yield name, value


def _number(value: object) -> object:
    """A value that is JSON everywhere: there is no NaN in it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- what was asked for ---------------------------------------------------------------------------


def check(targets: Sequence[str]) -> None:
    """SettingError for a ``--notify`` that can be neither a command nor an address."""
    for target in targets:
        if not target.strip() or not target.replace("\t", " ").isprintable():
            raise SettingError(f"--notify {target!r} is neither a command nor an address",
                               remedy="--notify 'COMMAND', or --notify https://…")  # fmt: skip
        if not _ADDRESS.match(target):
            continue
        try:
            parts = urlsplit(target)
            good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            good = False
        if not good:
            raise SettingError(
                f"--notify {shown(target)} is no address that JSON can be posted to",
                found="those begin with http:// or https:// and a host's name",
                remedy="--notify https://…",
            )


def doubts(targets: Sequence[str]) -> list[str]:
    """Warnings, before the start, of commands that are not there now."""
    return [
        f"paceline: warning: --notify: there is no program {word} here by now"
        for word in map(_program, targets)
        if word and shutil.which(os.path.expanduser(word)) is None and not _of_shell(word)  # noqa: PTH111
    ]


def _program(target: str) -> str:
    """The program of a simple command; empty for an address and whatever only a shell can tell."""
    if _ADDRESS.match(target):
        return ""
    with contextlib.suppress(ValueError):
        word = shlex.split(target)[0]
        return word if _PLAIN.fullmatch(word) and target.lstrip().startswith(word) else ""
    return ""


def _of_shell(word: str) -> bool:
    """Whether it is a shell's own word: echo, cd, exec, if."""
    asked = ["sh", "-c", 'command -v "$0"', word]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


def shown(target: str) -> str:
    """A target as a warning names it: who knows the rest of an address may post there, too."""
    if not _ADDRESS.match(target):
        return clean_line(_program(target) or target[:40])
    scheme, _, rest = target.partition("://")
    return clean_line(f"{scheme}://{re.split('[/?#]', rest)[0].rpartition('@')[2]}/…")


def secrets_among(targets: Sequence[str]) -> list[str]:
    """Addresses of which no file may show more than :func:`shown` does."""
    return [target for target in targets if _ADDRESS.match(target) and _says_more(target)]


def _says_more(address: str) -> bool:
    parts = urlsplit(address)
    return "@" in parts.netloc or bool(parts.path.strip("/") or parts.query)


# --- telling them ---------------------------------------------------------------------------------


def tell(targets: Sequence[str], ended: Ended, note: Callable[[str], None],
         patience: float = PATIENCE_S) -> None:  # fmt: skip
    """Tells everybody who is to hear of the end of a run, all at once.

    Args:
        targets: Commands and addresses, as ``--notify`` takes them.
        ended: What they are told.
        note: Takes a warning for each that could not be told.
        patience: Seconds, for all of them together.
    """
    if not targets:
        return
    redactor, deadline = Redactor(ended.secrets), time.monotonic() + patience
    text = redactor.whole(json.dumps(ended.to_json()).encode()).decode() + "\n"
    variables = {name: redactor.text(value) for name, value in ended.variables().items()}
    telling = [Telling(target, text, variables, deadline) for target in targets]
    try:
        for one in telling:
            one.thread.start()
        telling[0].thread.join(SOON_S)
        if slow := [shown(one.target) for one in telling if one.thread.is_alive()]:
            note(f"paceline: {ended.outcome}; waiting for --notify {', '.join(slow)}")
        for one in telling:
            one.thread.join(max(0.0, deadline - time.monotonic()) + 1.0)  # each ends itself first
    except KeyboardInterrupt:
        for one in telling:
            one.give_up()
        note("paceline: warning: --notify was given up at Ctrl-C")
        return
    for one in telling:
        if why := one.problem if not one.thread.is_alive() else f"no answer in {patience:g} s":
            note(f"paceline: warning: --notify {shown(one.target)}: {redactor.text(why)}")


class Telling:
    """One of them being told, in a thread of its own: a name may take long to be looked up.

    Attributes:
        problem: What went wrong; empty when nothing did.
    """

    def __init__(self, target: str, text: str, variables: Mapping[str, str],
                 deadline: float) -> None:  # fmt: skip
        self.target = target
        self.problem = ""
        self.thread = threading.Thread(target=self._tell, name="notify", daemon=True)
        self._text = text
        self._variables = variables
        self._deadline = deadline
        self._process: subprocess.Popen[str] | None = None

    def _tell(self) -> None:
        try:
            if _ADDRESS.match(self.target):
                self.problem = self._post()
            else:
                self._run()
        except (OSError, ValueError) as error:
            self.problem = clean_line(str(error) or type(error).__name__)

    def _left(self) -> float:
        return max(0.1, self._deadline - time.monotonic())

    def _run(self) -> None:
        """By a shell. What it prints goes where our own messages go."""
        self._process = process = subprocess.Popen(
            ["sh", "-c", self.target], text=True, stdin=subprocess.PIPE, stdout=2,
            env={**os.environ, **self._variables}, start_new_session=True,
        )  # fmt: skip
        began = time.monotonic()
        try:
            process.communicate(self._text, timeout=self._left())
        except subprocess.TimeoutExpired:
            self.give_up()
            self.problem = f"it was ended after {time.monotonic() - began:.0f} s"
            return
        if process.returncode < 0:
            self.problem = f"it was ended by {signal_name(-process.returncode)}"
        elif process.returncode:
            self.problem = f"it ended with exit status {process.returncode}"

    def give_up(self) -> None:
        """Ends the command, with what it started."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _post(self) -> str:
        """What went wrong."""
        import http.client  # these cost 20 ms, so only where they are used
        import urllib.error
        import urllib.request

        class StaysHere(urllib.request.HTTPRedirectHandler):
            """Follows nobody elsewhere: what was posted would be left behind."""

            def redirect_request(self, *_: Any) -> None:
                return None

        parts = urlsplit(self.target)
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"paceline/{__version__}",
        }
        user, at, place = parts.netloc.rpartition("@")
        if at:  # curl takes it so, too
            coded = base64.b64encode(unquote(user).encode()).decode()
            headers["Authorization"] = f"Basic {coded}"
        url = urlunsplit(parts._replace(netloc=place, fragment=""))
        request = urllib.request.Request(url, self._text.encode(), headers)  # noqa: S310
        opener = urllib.request.build_opener(StaysHere)
        try:
            with opener.open(request, timeout=self._left()) as answer:
                answer.read(1)
        except urllib.error.HTTPError as error:
            error.close()
            elsewhere = error.headers.get("Location", "") if 300 <= error.code < 400 else ""
            more = f", and it leads to {shown(elsewhere)}" if elsewhere else ""
            return clean_line(f"the answer was {error.code} {error.reason}{more}")
        except urllib.error.URLError as error:
            return clean_line(str(error.reason))
        except http.client.HTTPException as error:
            return clean_line(f"no answer of HTTP: {error!r}")
        return ""
