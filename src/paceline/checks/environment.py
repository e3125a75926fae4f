"""Do the logins set variables that make Python or its libraries fail?

Looks at: variables that the start-up files of each host export, and whether programs may be run
from its folder for temporary files.
Fails when: PYTHONHOME names another place than the interpreter's own. Warns when only some hosts
set a variable that decides which modules and libraries are loaded, or when that folder is mounted
noexec.
"""

from __future__ import annotations

from paceline.checks.check import Check, Survey, failed, passed, warned
from paceline.remote.agreement import LOADER_VARIABLES, outliers
from paceline.spec.finding import Finding


def evaluate(survey: Survey) -> list[Finding]:
    findings = [*_python_home(survey), *_differing(survey), *_noexec(survey)]
    return findings or [passed("environment", survey.names, "logins set no harmful variables")]


def _login_variables(survey: Survey, host: str) -> dict[str, str]:
    """Returns the variables that ranks on the host get from the login."""
    overridden = {*next(h.env for h in survey.hosts if h.name == host)}
    overridden |= {*survey.requirements.settled}
    variables = survey.facts[host].get("environment") or {}
    return {name: value for name, value in variables.items() if name not in overridden}


def _python_home(survey: Survey) -> list[Finding]:
    findings = []
    for name in survey.names:
        python_home = _login_variables(survey, name).get("PYTHONHOME", "")
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
    by_host = {name: _login_variables(survey, name) for name in survey.names}
    for variable in LOADER_VARIABLES:
        values = {name: variables.get(variable) for name, variables in by_host.items()}
        for name in outliers(values) if len(set(values.values())) > 1 else ():
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
    requirements = survey.requirements
    if not requirements.needs_torch or "TMPDIR" in requirements.settled:
        return []
    findings = []
    for name in survey.names:
        folder = (survey.facts[name].get("disks") or {}).get("tmp") or {}
        if folder.get("noexec"):
            message = (
                f"{folder['path']} on {name} is mounted noexec: torch.compile, Triton and "
                "extensions that are compiled at run time fail there"
            )
            remedy = (
                f"On {name}: export TMPDIR=FOLDER in ~/.bashrc, with a folder outside of "
                f"{folder['path']}; or for this job: --env TMPDIR=FOLDER"
            )
            findings.append(warned("environment", [name], message, remedy))
    return findings


check = Check("environment", "Login environment", evaluate)
