"""A data sample cannot be read.

Meaning: Reading or decoding one item of the data set failed.
Cause: A damaged, truncated or foreign file among the data, often on one host only.
Confirm: Open the named file on that host; compare its checksum with another host's: paceline
    check --data PATH.
Remedy: Replace the file (rsync -a from a host that has it whole), or remove it from the data
    set on all hosts.
Source: Pillow's, zipfile's and torch's messages.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "bad-sample",
    __doc__,
    [
        "UnidentifiedImageError: cannot identify image file '?(?P<path>[^']{1,500})",
        "(?P<path>image file is truncated)",
        r"zipfile\.BadZipFile: (?P<path>.*)",
        "(?P<path>Truncated File Read)",
        ("EOFError: (?P<path>Compressed file ended before the end-of-stream marker was reached)"),
        r"gzip\.BadGzipFile: (?P<path>.*)",
        "UnpicklingError: (?P<path>pickle data was truncated)",
    ],
    "{where}: a data sample cannot be read: {path}",
    confidence=0.95,
)
