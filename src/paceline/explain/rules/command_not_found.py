"""A program was not found.

Meaning: A shell or launcher could not find the program.
Cause: Non-interactive logins have another PATH: .bashrc returns early, conda or modules are
    not loaded.
Confirm: ssh HOST 'echo $PATH; which torchrun'
Remedy: Call by absolute path or through the interpreter (python -m torch.distributed.run);
    paceline uses the interpreter's absolute path itself. For modules: a hook with paceline setup
    env --activate.
Source: DeepSpeed 1481, ColossalAI 1779, horovod 205.
"""

from __future__ import annotations

from paceline.explain.rule import in_log

rule = in_log(
    "command-not-found",
    __doc__,
    [
        (
            r"(?:bash|sh|zsh|dash)(?:: line \d{1,9})?(?:: \d{1,9})?: (?P<name>[\w./-]{1,300}):"
            " (?:command )?not found"
        ),
        r"paceline: cannot run (?P<name>\S{1,300}): No such file or directory",
    ],
    "{where}: there is no program {name}",
    confidence=0.93,
)
