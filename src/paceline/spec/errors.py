"""The exception tree.

::

    PacelineError              handled: printed without traceback, exit status ``exit_code``
    ├── SettingError           an option, a file or a variable says something that cannot be
    ├── HostsError             a host file or host list cannot be understood (line and number)
    ├── ConnectError           hosts cannot be reached or refuse the login
    │   └── GoneError          … nor can they be had by a further try of this run
    ├── NodeError              a node cannot do what the plan needs (Python, torch, disk, port …)
    ├── DataError              a data set is missing, unreadable or unfit
    ├── LabError               the virtual cluster cannot do what was asked
    └── JobError               the job ran and failed; ``exit_code`` is the first failing rank's

Everything else that reaches the top is a bug of ours and shows its traceback.
"""

from __future__ import annotations

from paceline.spec.terminal import clean


class PacelineError(Exception):
    """A failure we understand, said in three parts.

    Args:
        message: What was asked for and why it cannot be (what you set).
        found: What was met instead (what we found). May be empty.
        remedy: What to type or change (what to do). May be empty.
        brief: What was met, in a few words that can stand behind a host's name; the first line of
            ``found`` unless it is given.
    """

    exit_code: int = 1
    origin_rank: int | None = None  # who met it, where every rank of a job raises the same

    def __init__(
        self, message: str, *, found: str = "", remedy: str = "", exit_code: int | None = None,
        brief: str = "",
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.message = message
        self.found = found
        self.remedy = remedy
        self.brief = brief or (found or message).split("\n", 1)[0]
        if exit_code is not None:
            self.exit_code = exit_code

    def render(self) -> str:
        """The error as the user reads it: one line a part."""
        lines = [f"paceline: {self.message}"]
        if self.found:
            lines.append(_indented("found:  ", self.found))
        if self.remedy:
            lines.append(_indented("remedy: ", self.remedy))
        return clean("\n".join(lines))

    def __str__(self) -> str:
        return self.render().removeprefix("paceline: ")


def _indented(label: str, text: str) -> str:
    pad = " " * (2 + len(label))
    return "  " + label + text.replace("\n", "\n" + pad)


class SettingError(PacelineError):
    """An option, a settings file or a variable holds something unusable."""

    exit_code = 2


class HostsError(PacelineError):
    """A description of hosts cannot be understood."""

    exit_code = 2


class ConnectError(PacelineError):
    """Hosts cannot be reached or do not let us in."""


class GoneError(ConnectError):
    """Hosts cannot be reached, and no further try of this run will reach them."""


class NodeError(PacelineError):
    """A node cannot do what the plan needs."""


class DataError(PacelineError):
    """A data set is missing, unreadable or unfit."""


class LabError(PacelineError):
    """The virtual cluster cannot be built or cannot do what was asked."""


class JobError(PacelineError):
    """The job ran and failed."""
