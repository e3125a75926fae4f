"""A library cannot be loaded.

Meaning: A compiled part of a package does not fit the system or another package.
Cause: Mixed versions (torch, CUDA, drivers, C library), or a library that is not on the
    loader's path in non-interactive shells.
Confirm: On that host: ldd of the file in the message; compare with a host on which it works:
    paceline check.
Remedy: Install the same package versions on all hosts; for a missing lib*.so set
    LD_LIBRARY_PATH with --env, or install the system package.
Source: DeepSpeed 1481; glibc's and CPython's messages.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "broken-library",
    __doc__,
    [
        r"(?P<words>lib[\w.+-]{1,200}: cannot open shared object file)",
        r"(?P<words>undefined symbol: \w+)",
        r"(?P<words>version `(?:GLIBC|GLIBCXX|CXXABI)_[\d.]{1,20}' not found)",
    ],
    "{where}: a library cannot be loaded ({words})",
    confidence=0.96,
)
