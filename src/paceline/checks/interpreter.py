"""Does the interpreter exist on every host, and is it the same Python?

Looks at: the requested path and the version of the interpreter that runs there.
Fails when: the path does not exist. Warns when the minor versions differ.
"""

from __future__ import annotations

from paceline.checks.check import Check, Survey, failed, passed, warned
from paceline.remote.agreement import differences, interpreter_problem
from paceline.spec.finding import Finding


def evaluate(survey: Survey) -> list[Finding]:
    findings = []
    for host in survey.present:
        requested = survey.requirements.pythons.get(host.name, survey.interpreters[host.name])
        problem = interpreter_problem(
            host, requested, survey.interpreters[host.name], survey.facts[host.name]
        )
        if problem is not None:
            message = f"{problem.message}; found {problem.found}"
            findings.append(failed("interpreter", [host.name], message, problem.remedy))
    return findings or _versions(survey)


def _versions(survey: Survey) -> list[Finding]:
    versions = {name: str(survey.facts[name]["python"]["version"]) for name in survey.names}
    if differing := differences("Python", versions):
        minor = {version.rsplit(".", 1)[0] for version in versions.values()}
        if len(minor) > 1:
            remedy = "Install one Python version on all hosts, or name equal ones with --python"
            return [warned("interpreter", survey.names, differing[0], remedy)]
    kinds = " and ".join(sorted(set(versions.values())))
    return [passed("interpreter", survey.names, f"Python {kinds}")]


check = Check("interpreter", "Python", evaluate)
