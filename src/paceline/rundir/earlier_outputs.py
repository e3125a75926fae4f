"""Finds the files in a project that other runs wrote, and that nobody has changed since.

A later run may replace them like its own. What they are now counts, not what git ignores. Only
lines count that this user sealed, in the journals of ``runs/`` and beside the run directory.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from paceline.agent.files import safe_paths
from paceline.rundir import records
from paceline.rundir.detached_file import LineSeals
from paceline.rundir.outputs import MAX_JOURNAL_BYTES, Output, OutputJournal, local_version
from paceline.rundir.ownership import detached_of, owner_alive, read_of_last_start, read_owner
from paceline.spec.rundir import DEFAULT_PARENT, OUTPUTS, RESULT, is_run

MAX_READ_BYTES = 256 << 20  # of the journals of other runs, the newest first
# of a line about a file, as OutputJournal writes it: saves the time to parse most lines
_BEGINNING = re.compile(rb'\{(?:"pending": \{)?"path": "([^"\\]*)", "size": ([0-9]{1,16}), ')


@dataclass(frozen=True, slots=True)
class _Journal:
    """What another run's journal says.

    Attributes:
        version: Of the journal.
        outputs: Lines about files that were in the project, unchanged, when it was read, by path.
        folders: Folders that the run made in the project.
    """

    version: tuple[int, int]
    outputs: dict[str, list[Output]]
    folders: set[str]


class EarlierOutputs:
    """The unchanged files of other runs in a project. Reads their journals at the first question.

    Blocking.

    Args:
        run: The run directory of the present run, whose own files are not meant.
        since: When the present run started, in seconds since 1970; by default, now.
    """

    def __init__(self, run: Path, project: Path, since: float | None = None) -> None:
        self._run, self._project = run, project
        self._since = round(time.time() if since is None else since, 3)
        # now: one that ends meanwhile has replaced some files of the present run, but not all
        self._running = {other for other in _runs_beside(run, project) if _may_run(other)}
        self._journals: dict[Path, _Journal] | None = None
        self._loading = threading.Lock()

    def may_replace(self, path: str, *, before: float = math.inf,
                    is_adopted: bool = False) -> bool:  # fmt: skip
        """Whether the file at a path of the project may give way to one of the present run.

        Not if a run wrote it that started later, or that was still running at the present start.

        Args:
            before: Time before which it must have arrived too.
            is_adopted: The present run's journal has it as an unchanged file of another run.
        """
        lines = self._current(path)
        if any(not output.is_adopted and (run in self._running or _may_run(run))
               for run, output in lines):  # fmt: skip
            return False
        if is_adopted and before == math.inf:
            return True
        latest = min(before, self._since)
        return any(output.time <= latest and not (output.is_local and self._is_of_user(path))
                   for _, output in lines)  # fmt: skip

    def writer(self, path: str, *, refresh: bool = False) -> tuple[Path, Output] | None:
        """The run that wrote the file at a path of the project last, and its line about it.

        ``refresh``: Reads what other runs have written since the first question.
        """
        self._load(refresh=refresh)
        written = [(run, output) for run, output in self._current(path) if not output.is_adopted]
        return max(written, key=lambda line: line[1].time, default=None)

    def _is_of_user(self, path: str) -> bool:
        """Whether no run made a folder of the path: then the user may have changed the file."""
        parents = PurePosixPath(path).parents
        return not any(self.made_folder(str(folder)) for folder in parents)

    def made_folder(self, folder: str) -> bool:
        """Whether another run made a folder of the project, and an unchanged file of it is there.

        If the user removed the folder and made it anew, no such file is there.
        """
        return any(folder in journal.folders
                   and any(path.startswith(f"{folder}/") for path in journal.outputs)
                   for journal in self._load().values())  # fmt: skip

    def to_adopt(self, paths: Iterable[str], *, refresh: bool = False) -> list[Output]:
        """Returns other runs' unchanged files at some paths, as outputs of the present run.

        Args:
            refresh: Reads what other runs have written since the first question.
        """
        self._load(refresh=refresh)
        adopted = []
        for lines in map(self._current, paths):
            if lines:
                first = min((output for _, output in lines), key=lambda output: output.time)
                # no checkpoint of the present run
                adopted.append(replace(first, has_state=False, is_adopted=True))
        return adopted

    def _current(self, path: str) -> list[tuple[Path, Output]]:
        """The lines about the version of a file that is in the project now, with their runs."""
        lines = [(run, output) for run, journal in self._load().items()
                 for output in journal.outputs.get(path, ())]  # fmt: skip
        version = local_version(self._project / path) if lines else None
        return [(run, output) for run, output in lines
                if (output.size, output.local_mtime_us) == version]  # fmt: skip

    def _load(self, *, refresh: bool = False) -> Mapping[Path, _Journal]:
        """Reads the journals of other runs, or those that have changed since they were read."""
        with self._loading:
            if self._journals is not None and not refresh:
                return self._journals
            known, journals = self._journals or {}, dict[Path, _Journal]()
            present, budget = _PresentFiles(self._project), MAX_READ_BYTES
            for other, version in _newest_journals(self._run, self._project):
                budget -= min(version[0], MAX_JOURNAL_BYTES)
                if budget < 0:
                    break
                is_known = other in known and known[other].version == version
                journals[other] = known[other] if is_known else _read(other, version, present)
            self._journals = journals
            return journals


class _PresentFiles:
    """What is in a project at one time."""

    def __init__(self, project: Path) -> None:
        self._project = project
        self._names: dict[str, frozenset[str]] = {}  # in each folder
        self._versions: dict[str, tuple[int, int] | None] = {}

    def version(self, path: str) -> tuple[int, int] | None:
        """Size and time of the last change of a file; ``None`` if there is none."""
        folder, _, name = path.rpartition("/")
        if folder not in self._names:
            self._names[folder] = frozenset()
            with contextlib.suppress(OSError, ValueError):
                if not (folder and safe_paths.refusal_reason(folder)):
                    with os.scandir(self._project / folder) as entries:
                        self._names[folder] = frozenset(entry.name for entry in entries)
        if name not in self._names[folder]:
            return None
        if path not in self._versions:
            self._versions[path] = local_version(self._project / path)
        return self._versions[path]


def _read(run: Path, version: tuple[int, int], present: _PresentFiles) -> _Journal:
    """Reads a journal of that version."""
    journal, seals = _Journal(version, {}, set()), LineSeals(run)
    try:
        head, tail = records.head_and_tail(run / OUTPUTS, 0, MAX_JOURNAL_BYTES)
    except (OSError, ValueError):
        return journal
    for line in (head or tail).split(b"\n"):
        if (match := _BEGINNING.match(line)) is not None:  # most files have gone, or changed
            current = present.version(match[1].decode("utf-8", "replace"))
            if current is None or current[0] != int(match[2]):
                continue
        value = records.parse_json(line.decode("utf-8", "replace"))
        # a launcher that was killed may not have recorded that a file is in its place
        entry = value.get("pending", value) if isinstance(value, dict) else None
        if not isinstance(entry, dict):
            continue
        path, folder = entry.get("path"), entry.get("folder")
        if isinstance(folder, str) and seals.is_valid(value):
            journal.folders.add(folder)
        if not isinstance(path, str) or entry.get("place") != "":
            continue
        # the seal last: it takes longest
        if present.version(path) == (entry.get("size"), entry.get("local_mtime_us")) and (
            seals.is_valid(value) and (output := Output.read(entry)) is not None
        ):
            journal.outputs.setdefault(path, []).append(output)
    return journal


def adopt(run: Path, project: Path, journal: OutputJournal, paths: Iterable[str]) -> set[str]:
    """Records files of the project that other runs wrote, and nobody changed. Blocking.

    Hosts get them as outputs. Returns their paths.
    """
    outputs = EarlierOutputs(run, project).to_adopt(journal.changed(paths, project))
    journal.add(outputs)
    return {output.path for output in outputs}


def _may_run(run: Path) -> bool:
    """Whether the run of a directory may write files in the project from now on."""
    owner = read_owner(run)
    if owner is not None and owner_alive(owner):
        return True
    detached = detached_of(run)
    return detached is not None and read_of_last_start(run, RESULT) is None


def _runs_beside(run: Path, project: Path) -> set[Path]:
    """The directories of other runs in the project's ``runs/``, and beside ``run``."""
    folders = [*run.parent.glob("*")]
    for folder in (project / DEFAULT_PARENT).glob("*"):
        folders.append(folder)
        if not is_run(folder):  # a folder of runs: --run-dir runs/sweep/first
            folders += folder.glob("*")
    # links may lead to the present run, such as runs/latest
    resolved = {Path(os.path.realpath(folder)) for folder in folders}
    return {folder for folder in resolved if records.is_regular(folder / OUTPUTS)} - {run.resolve()}


def _newest_journals(run: Path, project: Path) -> list[tuple[Path, tuple[int, int]]]:
    """The directories of other runs, and the version of each journal, latest written first."""
    versions = {other: local_version(other / OUTPUTS) for other in _runs_beside(run, project)}
    present = [(other, version) for other, version in versions.items() if version is not None]
    return sorted(present, key=lambda entry: entry[1][1], reverse=True)
