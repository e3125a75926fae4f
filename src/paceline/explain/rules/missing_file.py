"""A rank missed a file of the launching machine that was not sent to its host."""

from __future__ import annotations

import os
import re

from paceline.explain.evidence import MISSED_FILE, MISSED_MODULE, Evidence
from paceline.explain.rule import Match, match_unit
from paceline.spec.formatting import shell_text

_SEND = (
    "`--data {folder}` before the script sends the folder. Paths below it in the script's arguments"
    " then lead to the host's copy. A path that is fixed in the script does not: let the script"
    " read `$PACELINE_DATA_DIR`"
)


def match(evidence: Evidence, pattern: re.Pattern[str] = MISSED_FILE) -> Match | None:
    for unit, error in evidence.search(pattern):
        path = evidence.ignored_files.get(error["path"])
        if path is not None and path.endswith("/"):
            path = path.rstrip("/")
            cause = f"{unit.label}: the folder {path} was not sent to the host: git ignores it"
            remedy = f"{_SEND.format(folder=shell_text([path]))}. Or remove it from .gitignore"
            confirm = f"`{shell_text(['git', 'check-ignore', '-v', path])}`"
            return match_unit(unit, cause, 0.97, remedy=remedy, confirm=confirm)
        if path is not None:
            folder, name = os.path.split(path)
            add = shell_text(["git", "-C", folder, "add", "-f", name])
            cause = f"{unit.label}: {path} was not sent to the host, because git ignores it"
            remedy = (
                f"`{add}`, or remove it from .gitignore; the next start then sends it. If an"
                " earlier run wrote it, start with the `--run-dir` of that run instead. Send large"
                " data with `paceline run --data FOLDER SCRIPT`, and read it from"
                " `$PACELINE_DATA_DIR`"
            )
            confirm = f"`{shell_text(['git', '-C', folder, 'check-ignore', '-v', name])}`"
            return match_unit(unit, cause, 0.97, remedy=remedy, confirm=confirm)
        if path := evidence.unsent_files.get(error["path"]):
            folder, _ = os.path.split(path)
            cause = f"{unit.label}: {path} is on the launching machine, but not on the host"
            remedy = (
                f"{_SEND.format(folder=shell_text([folder]))}. If the folder holds more, put the"
                " file into one of its own"
            )
            return match_unit(unit, cause, 0.97, remedy=remedy)
    return _missing_in_checkout(evidence, pattern)


def _missing_in_checkout(evidence: Evidence, pattern: re.Pattern[str]) -> Match | None:
    """Matches a file of the project that a host with its own checkout misses, and rank 0 does not.

    No files are sent to such a host. A module is the project's if the launching machine has it in
    the project.
    """
    first_host = next((event.host for event in evidence.last_attempt
                       if event.kind == "rank started" and event.rank == 0), "")  # fmt: skip
    files = evidence.project_modules if pattern is MISSED_MODULE else None
    names = [(unit, error["path"]) for unit, error in evidence.search(pattern)]
    missing = [(unit, name if files is None else files.get(name, "")) for unit, name in names]
    missing_on_first = {path for unit, path in missing if first_host in unit.hosts}
    for unit, path in missing:
        host = next((host for host in unit.hosts if host in evidence.checkouts), "")
        if not (host and path) or first_host not in evidence.checkouts or path in missing_on_first:
            continue
        relative = os.path.relpath(path, evidence.checkouts[host]) if path[0] == "/" else path
        if relative.startswith(".."):
            continue
        source = os.path.normpath(f"{evidence.checkouts[first_host]}/{relative}")
        cause = f"{unit.label}: there is no {path} in the checkout of the project on {host}"
        remedy = (
            f"{host} has its own checkout of the project, so Paceline sends no files there. If rank"
            f" 0 wrote the file, it is {shell_text([f'{first_host}:{source}'])}. Copy it to the"
            f" same place below {evidence.checkouts[host]} on {host}, and on each other host that"
            " lacks it. With `--ship always` at every start, all hosts get what earlier starts in"
            " the same `--run-dir` wrote. If the project is on a disk that the hosts share, the"
            " rank read the file before rank 0 had written it: let it wait (dist.barrier())"
        )
        return match_unit(unit, cause, 0.8, remedy=remedy)
    return None
