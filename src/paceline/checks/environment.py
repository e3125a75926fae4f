"""Do the logins set variables with which Python or its libraries fail?

Looks at: variables that the start-up files of each host export, and whether programs may be run
from its folder for temporary files.
Fails when: PYTHONHOME names another place than the interpreter's own. Warns when a host alone sets
a variable that decides which modules and libraries are loaded, or when that folder is mounted
noexec.
"""

from __future__ import annotations

from paceline.checks.check import Check, Survey, failed, passed, warned
from paceline.remote.agreement import LOADING, odd_ones
from paceline.spec.finding import Finding


def evaluate(survey: Survey) -> list[Finding]:
    findings = [*_python_home(survey), *_differing(survey), *_noexec(survey)]
    return findings or [passed("environment", survey.names, "logins set no harmful variables")]


def _variables(survey: Survey, host: str) -> dict[str, str]:
    """What ranks there get from the login."""
    host_variables = next(h.env for h in survey.hosts if h.name == host)
    login_variables = survey.facts[host].get("environment") or {}
    return {
        n: v
        for n, v in login_variables.items()
        if n not in host_variables and n not in survey.requirements.settled
    }


def _python_home(survey: Survey) -> list[Finding]:
    findings = []
    for name in survey.names:
        python_home = _variables(survey, name).get("PYTHONHOME", "")
        python = survey.facts[name]["python"]
        if python_home and python_home != python.get("prefix"):
            message = (
                f"PYTHONHOME={python_home} is set on {name}, which is not the home of "
                f"{python['executable']} ({python.get('prefix')}): Python cannot start"
            )
            findings.append(failed("environment", [name], message, _unset(name, "PYTHONHOME")))
    return findings


def _differing(survey: Survey) -> list[Finding]:
    findings = []
    by_host = {name: _variables(survey, name) for name in survey.names}
    for variable in LOADING:
        values = {name: variables.get(variable) for name, variables in by_host.items()}
        for name in odd_ones(values) if len(set(values.values())) > 1 else ():
            setting = f"{variable}={values[name]}" if values[name] else f"no {variable}"
            message = f"{name} has {setting}, unlike the other hosts: it may load other libraries"
            findings.append(warned("environment", [name], message, _unset(name, variable)))
    return findings


def _unset(host: str, variable: str) -> str:
    return (
        f"On {host}: grep -n {variable} ~/.bashrc ~/.profile ~/.zshenv /etc/environment, and "
        f"remove it there; or for this job: --unset {variable}"
    )


def _noexec(survey: Survey) -> list[Finding]:
    folders = {n: (survey.facts[n].get("disks") or {}).get("tmp") or {} for n in survey.names}
    return [
        warned(
            "environment",
            [name],
            f"{folder['path']} on {name} is mounted noexec: torch.compile, Triton and extensions "
            "that are compiled at run time fail there",
            f"On {name}: export TMPDIR=FOLDER in ~/.bashrc, with a folder outside of "
            f"{folder['path']}; or for this job: --env TMPDIR=FOLDER",
        )
        for name, folder in folders.items()
        if folder.get("noexec") and survey.requirements.needs_torch
        and "TMPDIR" not in survey.requirements.settled
    ]  # fmt: skip


check = Check("environment", "Login environment", "facts", evaluate)
