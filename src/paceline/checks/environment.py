"""Do the logins set variables with which Python or its libraries fail?

Looks at: variables that the start-up files of each host export, and whether programs may be run
from its folder for temporary files.
Fails when: PYTHONHOME names another place than the interpreter's own. Warns when a host alone sets
a variable that decides which modules and libraries are loaded, or when that folder is mounted
noexec.
"""

from __future__ import annotations

from paceline.checks.check import Check, Scene, failed, passed, warned
from paceline.remote.agreement import LOADING, odd_ones
from paceline.spec.finding import Finding


def judge(scene: Scene) -> list[Finding]:
    found = [*_python_home(scene), *_differing(scene), *_noexec(scene)]
    return found or [passed("environment", scene.names, "logins set no harmful variables")]


def _variables(scene: Scene, host: str) -> dict[str, str]:
    """What ranks there get from the login."""
    own = next(h.env for h in scene.hosts if h.name == host)
    known = scene.facts[host].get("environment") or {}
    return {n: v for n, v in known.items() if n not in own and n not in scene.wishes.settled}


def _python_home(scene: Scene) -> list[Finding]:
    found = []
    for name in scene.names:
        home = _variables(scene, name).get("PYTHONHOME", "")
        python = scene.facts[name]["python"]
        if home and home != python.get("prefix"):
            message = (
                f"PYTHONHOME={home} is set on {name}, which is not the home of "
                f"{python['executable']} ({python.get('prefix')}): Python cannot start"
            )
            found.append(failed("environment", [name], message, _unset(name, "PYTHONHOME")))
    return found


def _differing(scene: Scene) -> list[Finding]:
    found = []
    by_host = {name: _variables(scene, name) for name in scene.names}
    for variable in LOADING:
        values = {name: own.get(variable) for name, own in by_host.items()}
        for name in odd_ones(values) if len(set(values.values())) > 1 else ():
            told = f"{variable}={values[name]}" if values[name] else f"no {variable}"
            message = f"{name} has {told}, unlike the other hosts: it may load other libraries"
            found.append(warned("environment", [name], message, _unset(name, variable)))
    return found


def _unset(host: str, variable: str) -> str:
    return (
        f"On {host}: grep -n {variable} ~/.bashrc ~/.profile ~/.zshenv /etc/environment, and "
        f"remove it there; or for this job: --unset {variable}"
    )


def _noexec(scene: Scene) -> list[Finding]:
    folders = {n: (scene.facts[n].get("disks") or {}).get("tmp") or {} for n in scene.names}
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
        if folder.get("noexec") and scene.wishes.needs_torch
        and "TMPDIR" not in scene.wishes.settled
    ]  # fmt: skip


check = Check("environment", "Login environment", "facts", judge)
