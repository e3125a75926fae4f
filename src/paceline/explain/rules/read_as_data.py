"""A login banner was read as data.

Meaning: Text printed by shell start-up files went into a place where data was expected.
Cause: echo or a tool's greeting in .bashrc on one host.
Confirm: ssh HOST true prints nothing on a quiet host.
Remedy: Move the printing in ~/.bashrc below `case $- in *i*) ;; *) return ;; esac`; paceline
    ignores such text itself and check names the host.
Source: DeepSpeed 2612, accelerate 2245.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "read-as-data",
    __doc__,
    [
        r"(?P<words>Received message too long \d+)",
        "(?P<words>Ensure the remote shell produces no output for non-interactive sessions)",
        (
            "(?P<words>protocol error: unexpected <newline>"
            r"|protocol version mismatch -- is your shell clean\?)"
        ),
    ],
    "a shell start-up file prints text where data is expected ({words})",
    confidence=0.96,
)
