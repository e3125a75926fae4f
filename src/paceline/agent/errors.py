"""How errors on this node are worded for the launcher."""

from __future__ import annotations


def describe_error(error: BaseException) -> str:
    """Names the problem: the system's words and the file, or the exception's type and text."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (" (%s)" % error.filename if error.filename else "")
    return "%s: %s" % (type(error).__name__, error)
