"""A file or folder is missing.

Meaning: A path that the script uses does not exist on that host.
Cause: Data or code lies on one machine only, paths differ between machines, or rank 0
    prepares on its own disk what others expect; files that git ignores are not shipped.
Confirm: ls -l PATH on that host and on one that works: paceline check --data PATH.
Remedy: Bring it to the same path on every host (rsync -a), mount the shared folder there, or
    ship it; a file that rank 0 makes belongs on a shared folder or behind a barrier.
Source: Megatron-DeepSpeed 125 and 126, DeepSpeedExamples 889, horovod 1396, trl 7223.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "missing-file",
    __doc__,
    [
        r"FileNotFoundError: \[Errno 2\] No such file or directory: '(?P<path>[^']{1,1000})'",
        r"can't open file '(?P<path>[^']{1,1000})': \[Errno 2\]",
        (
            r"^(?:\S{1,300}: )?(?:cd|cannot access|stat"
            "|open):? '?(?P<path>/[^':]{1,1000})'?: No such file or directory"
        ),
    ],
    "{where}: there is no {path}",
    confidence=0.93,
)
