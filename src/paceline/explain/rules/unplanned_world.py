r"""The world is not the planned one.

Meaning: A process joined a world of another size or with another rank than planned.
Cause: The script passes its own rank or world size to init_process_group, or some node
    started a world of its own.
Confirm: grep -n 'init_process_group\|world_size' in the script.
Remedy: Take rank and size from RANK and WORLD_SIZE (call init_process_group without them), or
    run with --any-world when it is meant.
Source: DeepSpeed 713 and 5221, accelerate 1795.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "unplanned-world",
    __doc__,
    ["the world is not the planned one: (?P<words>[^.]+)"],
    "{where}: {words}",
    confidence=0.99,
)
