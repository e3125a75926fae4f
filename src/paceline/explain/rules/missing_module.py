"""A Python module is missing.

Meaning: An import failed because the package is not installed in the interpreter that ran.
Cause: The environments of the nodes differ, or the wrong interpreter was used.
Confirm: On that host: PYTHON -c 'import MODULE' with the interpreter of the plan (plan.json,
    python).
Remedy: Install it on every host (paceline setup env --requirements FILE), or name the right
    interpreter: --python PATH, or python under [hosts.NAME] in paceline.toml.
Source: DeepSpeed 1481, horovod 205.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "missing-module",
    __doc__,
    [
        "ModuleNotFoundError: No module named '(?P<module>[^']{1,300})'",
        r"ImportError: No module named '?(?P<module>[\w.]+)'?",
        r"No module named (?P<module>[\w.]{1,300})$",
    ],
    "{where}: Python has no module {module}",
    confidence=0.97,
)
