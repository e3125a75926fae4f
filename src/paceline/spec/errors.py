"""The exceptions that Paceline handles.

::

    PacelineError              handled: printed without traceback, exit status ``exit_code``
    ├── SettingError           an option, a file or a variable has an unusable value
    ├── HostsError             a host file or host list cannot be parsed (line and number)
    ├── ConnectError           hosts cannot be reached or refuse the login
    │   └── PermanentConnectError  … and trying again in this run cannot help
    ├── NodeError              a node cannot do what the plan needs (Python, torch, disk, port …)
    ├── DataError              a data set is missing, unreadable or unfit
    ├── LabError               the virtual cluster cannot do what was requested
    └── JobError               the job ran and failed; ``exit_code`` is the first failing rank's

Any other exception is a bug of Paceline and shows its traceback.
"""

from __future__ import annotations

from paceline.spec.terminal import clean


class PacelineError(Exception):
    """A failure with a known cause, reported in three parts.

    Args:
        message: What was requested and why it is impossible.
        found: What was found instead; may be empty.
        remedy: What to type or change; may be empty.
        brief: Short form that can follow a host's name; by default the first line of ``found``.
    """

    exit_code: int = 1
    origin_rank: int | None = None  # the rank with the cause, if every rank raises the same

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
        """Formats the error for the user, each part on its own line."""
        lines = [f"paceline: {self.message}"]
        if self.found:
            lines.append(_indent("found:  ", self.found))
        if self.remedy:
            lines.append(_indent("remedy: ", self.remedy))
        return clean("\n".join(lines))

    def __str__(self) -> str:
        return self.render().removeprefix("paceline: ")


def _indent(label: str, text: str) -> str:
    pad = " " * (2 + len(label))
    return "  " + label + text.replace("\n", "\n" + pad)


class SettingError(PacelineError):
    """An option, a settings file or a variable holds something unusable."""

    exit_code = 2


class HostsError(PacelineError):
    """A description of hosts cannot be parsed."""

    exit_code = 2


class ConnectError(PacelineError):
    """Hosts cannot be reached or refuse the login."""

    num_refusals: int | None = None  # if the other hosts of the same attempt did answer


class PermanentConnectError(ConnectError):
    """Hosts cannot be reached, and trying again in this run cannot help."""


class NodeError(PacelineError):
    """A node cannot do what the plan needs."""


class DataError(PacelineError):
    """A data set is missing, unreadable or unfit."""


class LabError(PacelineError):
    """The virtual cluster cannot be built or cannot do what was requested."""


class JobError(PacelineError):
    """The job ran and failed."""
