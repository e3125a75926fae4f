"""Do the shell start-up files print anything?

Looks at: output of the login that is not the agent's.
Warns when: a host prints text in non-interactive shells; scp, rsync and other launchers read it as
data.
"""

from __future__ import annotations

from paceline.checks.check import Check, Survey, passed, warned
from paceline.spec.finding import Finding


def evaluate(survey: Survey) -> list[Finding]:
    findings = []
    for name in survey.names:
        if text := survey.shell_output.get(name, "").strip():
            line = text.splitlines()[0]
            quoted = repr(line if len(line) <= 60 else line[:59] + "…")
            message = (
                f"the shell start-up files of {name} print {quoted} (ignored here; scp and "
                "other launchers read it as data)"
            )
            remedy = (
                f"On {name}, in ~/.bashrc (or ~/.profile) move the printing below a line "
                "`case $- in *i*) ;; *) return ;; esac`"
            )
            findings.append(warned("shell", [name], message, remedy))
    return findings or [passed("shell", survey.names, "shell start-up files are quiet")]


check = Check("shell", "Shell start-up", evaluate)
