"""Records in the run directory which files a script wrote, and where they are on this machine.

``outputs.jsonl`` has a line for each version of a file that arrived, for each file that the script
removed, for each folder that a run made in the project, and for the project. A line before a file
moves to its place says that it is *pending*. The lines say which files of this machine are sent to
hosts and replaced, so launchers use only lines that this user sealed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from paceline.agent.files import safe_paths
from paceline.rundir import records
from paceline.rundir.detached_file import LineSeals
from paceline.rundir.directory import short
from paceline.rundir.output_rules import (
    DCP_INDEX,
    checkpoint_folders,
    is_checkpoint,
    is_of_save,
    rank_0_twin,
    saved_folders,
    unit_of,
    withheld_root,
)
from paceline.spec.rundir import OUTPUTS, PLAN

MAX_JOURNAL_BYTES = 64 << 20
MAX_SHOWN_BYTES = 2 << 20  # read by others than launchers
MIN_COMPACTED_LINES = 1000
MAX_COMPACTED_REMOVALS = 250  # removed files that a rewritten journal still names
MAX_EARLIER_RUNS = 20  # of which files in the project are known
_MAX_NUMBER = 1 << 53  # of bytes, and of microseconds since 1970
# of a trained model of transformers or peft, outside of checkpoint folders
_MODEL_FILES = frozenset({"adapter_model.safetensors", "model.safetensors", "pytorch_model.bin"})


@dataclass(frozen=True, slots=True)
class Output:
    """A file that a script wrote.

    Attributes:
        path: Relative to the project.
        host: Its host.
        place: Where it is here: relative to the run directory, or empty for its path in the
            project.
        mtime_us: Time of its last change on the host, in microseconds since 1970.
        time: When it arrived, in seconds since 1970.
        local_mtime_us: Time of the last change of the file here when it had arrived.
        has_state: Whether it may hold the state of a model or an optimizer in this run, by its
            content.
        is_adopted: Another run wrote it.
        is_local: It was found in the project itself, where the user may have written it.
        shards: Of the index of a distributed checkpoint: the names of its shards, in one line.
    """

    path: str
    size: int
    sha256: str
    host: str
    place: str
    mtime_us: int
    time: float
    local_mtime_us: int
    has_state: bool = True
    is_adopted: bool = False
    is_local: bool = False
    shards: str = ""

    @classmethod
    def read(cls, value: dict[str, Any]) -> Output | None:
        """Reads a line of the journal; ``None`` if it is another one, or damaged."""
        kinds = {"path": str, "size": int, "sha256": str, "host": str, "place": str,
                 "mtime_us": int, "time": float, "local_mtime_us": int,
                 "has_state": bool, "is_adopted": bool, "is_local": bool,
                 "shards": str}  # fmt: skip
        # the last four are not in lines of earlier versions
        given = {"has_state": True, "is_adopted": False, "is_local": False, "shards": "", **value}
        entry: dict[str, Any] = {field.name: given.get(field.name) for field in fields(cls)}
        if any(type(entry[name]) is not kind for name, kind in kinds.items()):
            return None
        numbers = [entry[name] for name, kind in kinds.items() if kind in (int, float)]
        if not all(0 <= number < _MAX_NUMBER for number in numbers):
            return None
        output = cls(**entry)
        paths = [path for path in (output.path, output.place) if path]
        return None if any(map(safe_paths.refusal_reason, paths)) else output

    def local_path(self, run: Path, project: Path | None) -> Path | None:
        """Where the file is on this machine; ``None`` if it is in a project that is elsewhere."""
        if self.place:
            return run / self.place
        return project / self.path if project is not None else None

    def is_unchanged(self, run: Path, project: Path | None) -> bool:
        """Whether this version is at its place on this machine."""
        local = self.local_path(run, project)
        return local is not None and local_version(local) == (self.size, self.local_mtime_us)


def local_version(path: Path) -> tuple[int, int] | None:
    """Size and time of the last change of a regular file, in µs; ``None`` if there is none.

    A link to a file beside it counts as that file.
    """
    path = path.parent / safe_paths.resolve_link(str(path.parent), path.name)
    try:
        status = path.lstat()
    except (OSError, ValueError):
        return None
    if not records.is_regular(path):
        return None
    return status.st_size, status.st_mtime_ns // 1000


class OutputRecords:
    """What the lines of a journal say.

    Attributes:
        outputs: The latest version of each file that the script has not removed, by path.
        removed: The latest version of each file that the script has removed, by path. What has
            arrived here stays.
        pending: Versions that were about to move to their places, by path.
        folders: Folders that these runs made in the project.
        versions: Path and SHA-256 of each version that has arrived, by the place where it did.
        arrived: Path, size and time of the last change on the host of each version.
        project: The project at the last start; ``None`` if it was on another machine.
    """

    def __init__(self) -> None:
        self.outputs: dict[str, Output] = {}
        self.removed: dict[str, Output] = {}
        self.pending: dict[str, Output] = {}
        self.folders: set[str] = set()
        self.versions: dict[str, tuple[str, str]] = {}
        self.arrived: set[tuple[str, int, int]] = set()
        self.project: Path | None = None
        self._local_start_us: int | None = None

    def read(self, line: bytes) -> None:
        """Takes a line into account; ignores damaged ones."""
        value = records.parse_json(line.decode("utf-8", "replace"))
        if not isinstance(value, dict) or not self._accepts(value):
            return
        if isinstance(folder := value.get("folder"), str):
            self.folders.add(folder)
        elif isinstance(project := value.get("project"), str):
            self.project = Path(project) if project else None
        elif type(start := value.get("local_start_us")) is int:
            self._local_start_us = start
        elif isinstance(path := value.get("removed"), str):
            self._forget(path)
        elif isinstance(pending := value.get("pending"), dict):
            if (output := Output.read(pending)) is not None:
                self.pending[output.path] = output
        elif (output := Output.read(value)) is not None:
            self._include([output])

    def _accepts(self, value: dict[str, Any]) -> bool:
        """Whether a line counts."""
        return True

    def _include(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            self.outputs[output.path] = output
            self.removed.pop(output.path, None)
            self.pending.pop(output.path, None)
            self.versions[output.place or output.path] = output.path, output.sha256
            self.arrived.add((output.path, output.size, output.mtime_us))

    def _forget(self, path: str) -> None:
        if (output := self.outputs.pop(path, None)) is not None:
            self.removed[path] = output


class OutputJournal(OutputRecords):
    """The files that scripts wrote in all runs of a run directory.

    Args:
        seals: Only lines with a valid seal count, and new ones get one. ``None``: all lines count,
            of a huge file the last ones; for display only.

    Attributes:
        num_foreign: Lines without a valid seal.
    """

    def __init__(self, run: Path, seals: LineSeals | None = None) -> None:
        super().__init__()
        self._run, self._seals = run, seals
        self.num_foreign = 0
        self._num_lines = 0
        size = MAX_SHOWN_BYTES if seals is None else MAX_JOURNAL_BYTES
        try:
            head, tail = records.head_and_tail(run / OUTPUTS, 0, size)
        except OSError:
            return
        lines = (head or tail).split(b"\n")
        for line in lines[:-1]:  # the last is empty, or cut off
            self.read(line)
        self._num_lines = len(lines)

    def _accepts(self, value: dict[str, Any]) -> bool:
        is_valid = self._seals is None or self._seals.is_valid(value)
        self.num_foreign += not is_valid
        return is_valid

    def compact(self) -> None:
        """Rewrites a journal that consists mostly of versions that were replaced."""
        if self._num_lines > MIN_COMPACTED_LINES + 2 * (len(self.outputs) + len(self.folders)):
            lines: list[dict[str, Any]] = [{"project": str(self.project or "")}]
            lines += [{"folder": folder} for folder in sorted(self.folders)]
            for output in [*self.removed.values()][-MAX_COMPACTED_REMOVALS:]:
                lines += [asdict(output), {"removed": output.path}]
            lines += [asdict(output) for output in self.outputs.values()]
            lines += [{"pending": asdict(output)} for output in self.pending.values()]
            if self._local_start_us is not None:
                lines.append({"local_start_us": self._local_start_us})
            safe_paths.write_file(str(self._run), OUTPUTS, self._encode(lines))

    def add(self, outputs: Sequence[Output]) -> None:
        """Records files that are complete only together, at once."""
        self._append([asdict(output) for output in outputs])
        self._include(outputs)

    def add_pending(self, outputs: Sequence[Output]) -> None:
        """Records files before they move to their places; :meth:`add` follows when they are there.

        A file that is there counts as the run's own from now on.
        """
        self._append([{"pending": asdict(output)} for output in outputs])
        self.pending |= {output.path: output for output in outputs}

    def confirm_pending(self, project: Path | None) -> None:
        """Records pending files that have reached their places: an earlier process was killed."""
        self.add([output for output in self.pending.values()
                  if output.is_unchanged(self._run, project)])  # fmt: skip

    def changed(self, paths: Iterable[str], project: Path | None) -> list[str]:
        """The paths without those of outputs that are as they arrived, or not in the project."""

        def is_changed(output: Output | None) -> bool:
            return output is None or not (output.place or output.is_unchanged(self._run, project))

        return [path for path in paths if is_changed(self.outputs.get(path))]

    def add_folder(self, folder: str) -> None:
        """Records a folder that the run makes in the project, or found empty there."""
        self._append([{"folder": folder}])
        self.folders.add(folder)

    def set_project(self, project: Path | None) -> None:
        """Records the project of this start; ``None`` if it is on another machine."""
        if project != self.project:
            self._append([{"project": str(project or "")}])
            self.project = project

    def mark_local_start(self, timestamp_us: int) -> int:
        """Returns when rank 0 first started on this machine, which is now if it had not."""
        if self._local_start_us is None:
            self._append([{"local_start_us": timestamp_us}])
            self._local_start_us = timestamp_us
        return self._local_start_us

    def remove(self, paths: Iterable[str]) -> None:
        """Records that the script has removed files; what has arrived here stays."""
        recorded = [path for path in paths if path in self.outputs]
        self._append([{"removed": path, "time": round(time.time(), 3)} for path in recorded])
        for path in recorded:
            self._forget(path)

    def _append(self, lines: Sequence[dict[str, Any]]) -> None:
        if not lines:
            return
        data = self._encode(lines)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        file = safe_paths.open_file(str(self._run), OUTPUTS, flags)
        try:
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":  # cut off by a full disk
                data = b"\n" + data
            safe_paths.write_fully(file, data)
            os.fsync(file)
        except OSError:
            os.ftruncate(file, size)
            raise
        finally:
            os.close(file)

    def _encode(self, lines: Sequence[dict[str, Any]]) -> bytes:
        sealed = lines if self._seals is None else map(self._seals.sealed, lines)
        return b"".join(json.dumps(line).encode() + b"\n" for line in sealed)


def _newest_runs(run: Path) -> list[Path]:
    """The runs beside a run directory whose scripts last wrote files, newest first."""
    ages: dict[Path, int] = {}
    for journal in run.parent.glob(f"*/{OUTPUTS}"):
        version = local_version(journal)
        if version is not None and version[0] <= MAX_SHOWN_BYTES and journal.parent != run:
            ages[journal.parent] = version[1]
    return sorted(ages, key=ages.__getitem__, reverse=True)[:MAX_EARLIER_RUNS]


def _script(run: Path) -> tuple[str, str]:
    """What a run started, by its plan: the kind of entry and its target."""
    plan = records.read_object(run / PLAN) or {}
    entry = records.object_in(plan, "entry")
    kind, target = (records.as_text(entry.get(name)) for name in ("kind", "target"))
    return kind, os.path.normpath(target) if kind == "script" else target


def earlier_checkpoint(run: Path, project: Path,
                       is_sent: Callable[[str], bool]) -> tuple[Path, str] | None:  # fmt: skip
    """The checkpoint that another run of the same script wrote in a project and hosts do not get.

    The other run directory is beside this one.

    Args:
        is_sent: Whether hosts get the file at a path of the project.

    Returns:
        The directory of the run that wrote it, and its path; ``None`` if there is none.
    """
    script = _script(run)
    for other in _newest_runs(run):
        if _script(other) != script:
            continue
        journal = OutputJournal(other, LineSeals(other))
        newest = newest_checkpoint(output for output in journal.outputs.values()
                                   if not output.place and output.is_unchanged(other, project)
                                   )  # fmt: skip
        if newest is not None and not any(is_sent(output.path) for output in newest[1]):
            return other, newest[0]
    return None


def newest_checkpoint(outputs: Iterable[Output]) -> tuple[str, list[Output]] | None:
    """The newest checkpoint, a file or a folder, with its files; ``None`` if there is none.

    Neither a distributed one that lacks shards, nor a file of another rank than 0.
    """
    outputs = list(outputs)
    incomplete = incomplete_checkpoints(outputs)
    saved = saved_folders(output.path for output in outputs)
    units: dict[str, list[Output]] = {}
    for output in outputs:
        if not withheld_root(output.path, incomplete):
            unit = _dcp_folder(output.path) or unit_of(output.path, saved=saved)
            units.setdefault(unit, []).append(output)
    checkpoints = {unit: files for unit, files in units.items()
                   if unit.rpartition("/")[2] != "training_args.bin"
                   and not rank_0_twin(unit, units)
                   and is_checkpoint(unit, [file.path for file in files if file.has_state])
                   }  # fmt: skip
    resumable = {unit: files for unit, files in checkpoints.items()
                 if unit.rpartition("/")[2] not in _MODEL_FILES}  # fmt: skip
    checkpoints = resumable or checkpoints  # a trained model is one if there is no other
    if not checkpoints:
        return None
    newest = max(checkpoints, key=lambda unit: max(file.mtime_us for file in checkpoints[unit]))
    return newest, checkpoints[newest]


def incomplete_checkpoints(outputs: Iterable[Output]) -> set[str]:
    """The folders of distributed checkpoints of which some shards are not among the outputs."""
    paths = {output.path: output.shards for output in outputs}
    incomplete = set[str]()
    for path, shards in paths.items():
        prefix = path[: len(path) - len(DCP_INDEX)]
        if any(prefix + name not in paths for name in shards.split()):
            incomplete |= checkpoint_folders(path)
    return incomplete


def script_checkpoint(run: Path) -> str:
    """Returns where the script's newest checkpoint is here; empty if none is.

    None that has been removed. A project on another machine, or one that has been moved, cannot be
    looked at.
    """
    journal = OutputJournal(run)
    is_here = os.path.isdir(journal.project or "")  # noqa: PTH112 - false if it cannot be read
    project = journal.project if is_here else None
    paths = [(output, output.local_path(run, project))
             for output in journal.outputs.values()]  # fmt: skip
    newest = newest_checkpoint(output for output, path in paths
                               if path is None or local_version(path) is not None)  # fmt: skip
    if newest is None:
        return ""
    unit, outputs = newest
    place = next((output.place for output in outputs if output.place), "")
    if not place:
        return unit
    output = next(output for output in outputs if output.place == place)
    return short(run / place.removesuffix(output.path[len(unit) :]))


def _dcp_folder(path: str) -> str:
    return path.rpartition("/")[0] if is_of_save(path) else ""
