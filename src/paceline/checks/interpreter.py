"""Does the interpreter exist on every host, and is it the same Python?

Looks at: the path asked for and the version of what runs there.
Fails when: there is nothing at that path. Warns when the minor versions differ.
"""

from __future__ import annotations

from paceline.checks.check import Check, Scene, failed, passed, warned
from paceline.remote.agreement import differences, interpreter_problem
from paceline.spec.finding import Finding


def judge(scene: Scene) -> list[Finding]:
    found = []
    for host in scene.present:
        wanted = scene.wishes.pythons.get(host.name, scene.chosen[host.name])
        problem = interpreter_problem(host, wanted, scene.chosen[host.name], scene.facts[host.name])
        if problem is not None:
            message = f"{problem.message}; found {problem.found}"
            found.append(failed("interpreter", [host.name], message, problem.remedy))
    return found or _versions(scene)


def _versions(scene: Scene) -> list[Finding]:
    versions = {name: str(scene.facts[name]["python"]["version"]) for name in scene.names}
    if differing := differences("Python", versions):
        minor = {version.rsplit(".", 1)[0] for version in versions.values()}
        if len(minor) > 1:
            remedy = "Install one Python version on all hosts, or name equal ones with --python"
            return [warned("interpreter", scene.names, differing[0], remedy)]
    kinds = " and ".join(sorted(set(versions.values())))
    return [passed("interpreter", scene.names, f"Python {kinds}")]


check = Check("interpreter", "Python", "facts", judge)
