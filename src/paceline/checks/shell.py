"""Do the shell start-up files print anything?

Looks at: what stood outside our frames when logging in.
Warns when: a host prints text for non-interactive shells: scp, rsync and other launchers read
it as data.
"""

from __future__ import annotations

from paceline.checks.check import Check, Survey, passed, warned
from paceline.spec.finding import Finding


def evaluate(survey: Survey) -> list[Finding]:
    findings = [
        warned(
            "shell",
            [name],
            f"the shell start-up files of {name} print {_quoted(text)} (ignored here; scp and "
            "other launchers read it as data)",
            f"On {name}, in ~/.bashrc (or ~/.profile) move the printing below a line "
            "`case $- in *i*) ;; *) return ;; esac`",
        )
        for name in survey.names
        if (text := survey.shell_output.get(name, "").strip())
    ]
    return findings or [passed("shell", survey.names, "shell start-up files are quiet")]


def _quoted(text: str) -> str:
    line = text.splitlines()[0]
    return repr(line if len(line) <= 60 else line[:59] + "…")


check = Check("shell", "Shell start-up", "facts", evaluate)
