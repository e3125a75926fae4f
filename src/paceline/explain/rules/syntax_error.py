"""The script cannot be parsed.

Meaning: Python does not understand the source of the script.
Cause: A typing error, or an interpreter older than the script expects, on one host perhaps.
Confirm: PYTHON -m py_compile FILE on that host; python --version on all: paceline check.
Remedy: Correct the line, or use the same newer Python on all hosts.
Source: CPython's messages.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "syntax-error",
    __doc__,
    ["^(?P<words>(?:SyntaxError|IndentationError|TabError): .+)"],
    "{where}: {words}",
    confidence=0.95,
)
