"""Places files that a script wrote on this machine, and chooses which of them hosts get.

They arrive where the script wrote them if the rules of ``rundir/output_rules.py`` permit that, else
below ``files/HOST/`` in the run directory. No file that somebody else made or changed is replaced.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

from paceline.agent.files import safe_paths
from paceline.agent.files.safe_paths import INCOMING, fold_name
from paceline.agent.files.snapshot import hash_file
from paceline.rundir.arrivals import Arrivals
from paceline.rundir.detached_file import LineSeals
from paceline.rundir.directory import short
from paceline.rundir.earlier_outputs import EarlierOutputs
from paceline.rundir.output_rules import (
    PathState,
    WrittenFile,
    has_rank_0,
    head_of,
    index_of,
    is_checkpoint,
    is_index,
    is_of_checkpoint,
    is_of_save,
    is_shard,
    kept_out_reason,
    lacking_parts,
    name_refusal,
    rank_in,
    unit_of,
    withheld_root,
)
from paceline.rundir.outputs import (
    Output,
    OutputJournal,
    earlier_checkpoint,
    incomplete_checkpoints,
    local_version,
    newest_checkpoint,
)
from paceline.spec.formatting import pluralize
from paceline.spec.rundir import (
    FETCHED,
    MODEL,
    OUTPUTS,
    OUTSIDE,
    is_product,
    is_reserved,
    is_run,
    safe_name,
)
from paceline.transfer.moves import move_file, set_mtime
from paceline.transfer.output_folders import RUN_PREFIX, shards_beside
from paceline.transfer.torch_files import has_state, shards_in
from paceline.transfer.tree import Manifest

UNPLACED = f"{INCOMING}/outputs"  # in the run directory: complete files that have no place yet
MAX_NAMED = 3  # files that a line names


class LocalOutputs:
    """The files that a script wrote in all runs of a run directory.

    Args:
        run: The run directory.
        note: Shows a line to the user.

    Attributes:
        project: The project on this machine; ``None`` if it is on another one.
        kept_out: Files that did not arrive in the project: where they are, by path.
        returned: Files of other runs that gave way to this run's: where they are.
        unmatched: Files that hosts keep of their own ranks, after rank 0's host was lost.
    """

    def __init__(self, run: Path, note: Callable[[str], None]) -> None:
        self.project: Path | None = None
        self.kept_out: dict[str, str] = {}
        self.returned: list[Path] = []
        self.unmatched = set[str]()
        self.journal = OutputJournal(run, LineSeals(run))
        if num_foreign := self.journal.num_foreign:
            note(f"paceline: {short(run / OUTPUTS)} has {pluralize(num_foreign, 'line')} that you"
                 " did not write in this folder: their files are not sent to hosts")  # fmt: skip
        self.journal.compact()
        self._run, self._note = run, note
        self._earlier: EarlierOutputs | None = None
        self._run_records: dict[Path, tuple[Arrivals, OutputJournal]] = {}
        self._code = frozenset[str]()  # paths of the sent code, as file systems may compare them
        self._arrivals: Arrivals | None = None
        self._fresh = set[str]()  # paths of what arrived since the ranks started
        shutil.rmtree(run / UNPLACED, ignore_errors=True)  # of a launcher that was killed

    def set_code(self, project: Path | None, manifest: Manifest,
                 earlier: EarlierOutputs | None = None) -> set[str]:  # fmt: skip
        """Sets the project, which is not here in a detached run, and the files sent from it.

        Blocking.

        Args:
            earlier: What is known of other runs; by default, of those that started before now.

        Returns:
            Paths in ``manifest`` that other runs wrote: they are sent as outputs, not as code.
        """
        self.project, self._earlier = project, None
        self.journal.set_project(project)
        self.journal.confirm_pending(project)
        sent = {str(entry[0]) for entry in manifest}
        if project is not None:
            self._earlier = earlier or EarlierOutputs(self._run, project)
        adopted = self._adopt(sent)
        self._code = frozenset(map(fold_name, sent - adopted))
        return adopted

    def _adopt(self, paths: Set[str], *, refresh: bool = False) -> set[str]:
        """Records unchanged files of other runs; returns their paths."""
        if not paths or self._earlier is None:
            return set()
        adopted = self._earlier.to_adopt(self.journal.changed(paths, self.project), refresh=refresh)
        self.journal.add(adopted)
        return {output.path for output in adopted}

    def _was_sent(self, path: str) -> bool:
        return fold_name(path) in self._code

    def unsent_checkpoint(self) -> tuple[Path, str] | None:
        """A checkpoint of another run in the project, if this run has none. Blocking.

        Returns:
            The directory of the run that wrote it, and its path.
        """
        if self.project is None or newest_checkpoint(self.journal.outputs.values()) is not None:
            return None

        def is_sent(path: str) -> bool:
            return path in self.journal.outputs or self._was_sent(path)

        return earlier_checkpoint(self._run, self.project, is_sent)

    def _is_code(self, path: str) -> bool:
        """Whether a file was sent and is no checkpoint: no host may change it on the others."""
        has_suffix = "." in path.rpartition("/")[2]  # programs often have none
        is_checkpoint_file = is_index(path) or (has_suffix and is_checkpoint(path, [path]))
        return self._was_sent(path) and unit_of(path) == path and not is_checkpoint_file

    def travels(self, path: str) -> bool:
        """Whether a file may come from a node that wrote it, or go to one, by its path."""
        if path.startswith(RUN_PREFIX):
            name = path.removeprefix(RUN_PREFIX)
            return not _is_of_run(name) and not name_refusal(name, in_own_folder=True)
        return not name_refusal(path, in_own_folder=True)

    # --- to its place ------------------------------------------------------------------------

    def place_unit(self, host: str, group: Sequence[WrittenFile], hashes: Mapping[str, str],
                   index: Output | None = None,
                   is_uncollected: bool = False) -> None:  # fmt: skip
        """Records received files and moves them to their places; a folder goes to one place.

        Args:
            index: Of the distributed checkpoint to which the files belong, if it is here already.
            is_uncollected: Ranks of an earlier start wrote them. They do not replace what another
                run wrote later.
        """
        before = min(map(_mtime_us, group)) / 1e6 if is_uncollected else math.inf
        states = {file.path: self._state(file.path, before) for file in group}
        is_taken = any(state.exists and not state.is_own_output for state in states.values())
        is_beside = index is not None and bool(index.place)
        outputs = []
        for file in group:
            is_out = (self.project is None or is_taken or is_beside
                      or file.path.startswith(RUN_PREFIX)
                      or kept_out_reason(file.path, states[file.path]))  # fmt: skip
            owner = index.host if index is not None and is_beside else host
            place = self._place_outside(owner, file.path) if is_out else ""
            outputs.append(Output(file.path, file.size, hashes[file.path], host, place,
                                  file.mtime_us, round(time.time(), 3), file.mtime_us,
                                  has_state(self._run / UNPLACED / file.path),
                                  shards=shards_in(self._run / UNPLACED / file.path)
                                  ))  # fmt: skip
        # Before they are there, they must not count as arrived; then not as files of the user.
        self.journal.add_pending(outputs)
        placed = []
        for output in sorted(outputs, key=lambda output: output.mtime_us):
            unplaced = f"{UNPLACED}/{output.path}"
            set_mtime(self._run, unplaced, output.mtime_us)
            if not output.place and not self._place(output.path, unplaced, states[output.path]):
                output = replace(output, place=self._place_outside(host, output.path))
            if output.place:
                self._keep_out(output, unplaced)
            placed.append(output)
        self.journal.add(placed)
        self._fresh |= {output.path for output in placed}
        for output in filter(lambda output: is_index(output.path), placed):
            if self.project is not None and not output.place:
                beside = shards_beside(self.project, output.path) - self._fresh
                self._adopt({path for path in beside if self._state(path, before).is_own_output})
            self._remove_old_shards(output.path, self._fresh, is_outside=bool(output.place))

    def _remove_old_shards(self, index: str, kept: Collection[str], *, is_outside: bool) -> None:
        """Removes the shards that do not belong to a new index.

        Torch would load them together with new ones. The other ranks' arrive at the run's end.
        """
        self.remove_shards([path for path in self.journal.outputs if is_shard(path)
                            and index_of(path) == index and path not in kept],
                           is_outside=is_outside)  # fmt: skip

    def remove_shards(self, paths: Iterable[str], *, is_outside: bool) -> None:
        """Forgets shards, and removes those at the place of their index that nobody changed.

        A shard that another run wrote goes back to that run's directory.


        ``is_outside``: The index is in the run directory, not in the project.
        """
        recorded = [output for path in paths if (output := self.journal.outputs.get(path))]
        for output in recorded:
            is_beside = bool(output.place) == is_outside
            if is_beside and output.is_unchanged(self._run, self.project):
                with contextlib.suppress(OSError):  # torch would load it with new ones
                    if output.is_adopted and self._return_to_writer(output.path):
                        continue
                root = self._run if output.place or self.project is None else self.project
                with safe_paths.FolderCache(str(root)) as folders:
                    folders.remove(output.place or output.path)
        self.journal.remove([output.path for output in recorded])

    def twin_times(self, paths: Iterable[str]) -> dict[str, int]:
        """When rank 0's files among some paths were written last, in µs; of those with a rank."""
        journal = self.journal
        known = {path: journal.outputs.get(path) or journal.removed.get(path) for path in paths
                 if has_rank_0(path) and is_of_checkpoint(path)}  # fmt: skip
        return {path: output.mtime_us for path, output in known.items() if output is not None}

    def forget_parts(self, former: Mapping[str, int]) -> None:
        """Forgets files of other ranks beside which rank 0's are new: ranks would load two saves.

        Those of other hosts arrive when the ranks have ended. On rank 0's host, a file is of the
        save that is closer in time.

        Args:
            former: When rank 0's files had been written before, as :meth:`twin_times` returns it.
        """
        outputs = self.journal.outputs
        middle = {path: (outputs[path].mtime_us + mtime_us) // 2
                  for path, mtime_us in former.items()
                  if outputs[path].mtime_us != mtime_us}  # fmt: skip
        if not middle:
            return
        twins = {path: head_of(path, middle) for path in outputs if rank_in(path)}
        self.journal.remove([
            path for path, twin in twins.items() if twin
            and (outputs[path].host != outputs[twin].host
                 or outputs[path].mtime_us < middle[twin])
        ])  # fmt: skip

    def outdated_parts(self) -> list[str]:
        """Files of other ranks that hosts do not get, because rank 0's is newer."""
        outputs = self.journal.outputs
        return sorted(path for path in list(self.journal.removed)
                      if not is_shard(path) and head_of(path, outputs))  # fmt: skip

    def missing_parts(self, num_ranks: int) -> list[str]:
        """Checkpoints of which hosts do not get all parts, because these are not here. Blocking.

        Args:
            num_ranks: Of the job: files of higher ranks are not missed.
        """
        outputs = self.journal.outputs
        outdated = [path for path in self.outdated_parts() if (rank_in(path) or 0) < num_ranks]
        times = {path: output.mtime_us for path, output in list(outputs.items())
                 if head_of(path, outputs) or has_rank_0(path)}  # fmt: skip
        folders = {folder or "." for folder in self.incomplete()}
        return sorted({*folders, *outdated, *lacking_parts(times, num_ranks), *self.unmatched})

    def paths(self) -> set[str]:
        """Files of the project that are no code: hosts get them as outputs, or not at all."""
        return {*self.journal.outputs, *self.outdated_parts()}

    def incomplete(self) -> set[str]:
        """Folders of distributed checkpoints of which shards are not here. Blocking."""
        saves = [output for output in list(self.journal.outputs.values())
                 if is_of_save(output.path)]  # fmt: skip
        paths = {output.path: output.local_path(self._run, self.project) for output in saves}
        present = {path for path, local in paths.items() if local and local_version(local)}
        return incomplete_checkpoints(output for output in saves if output.path in present)

    def unsent_of_other_ranks(self) -> list[str]:
        """Checkpoints that other ranks wrote, in the run directory, and hosts do not get. Blocking.

        Their names do not say which rank wrote them.
        """
        outputs = self.journal.outputs
        first = {safe_name(output.host) for output in list(outputs.values())
                 if not rank_in(output.path) and not is_shard(output.path)}  # fmt: skip
        known, folder = {*outputs, *self.journal.removed}, self._run / FETCHED
        unsent = []
        for file in folder.rglob("*"):
            host, _, path = file.relative_to(folder).as_posix().partition("/")
            is_unknown = host not in first and path not in known and self.travels(path)
            if is_unknown and is_checkpoint(path, [path]) and not is_shard(path):
                # without rank 0's file, it is of a checkpoint that rank 0 has removed
                is_rotated = rank_in(path) is not None and not head_of(path, outputs)
                if not is_rotated and OUTSIDE not in path.split("/") and file.is_file():
                    unsent.append(f"{FETCHED}/{host}/{path}")
        return sorted(unsent)

    def _state(self, path: str, before: float = math.inf) -> PathState:
        """What this machine has at a path of the project.

        Args:
            before: In seconds since 1970. Later files of other runs are not to be replaced.
        """
        if self.project is None:
            return PathState()
        assert self._earlier is not None
        own, folder = False, ""
        if is_run(self.project) and _is_of_run(path):
            return PathState(exists=True)
        for part in path.split("/")[:-1]:
            folder = f"{folder}/{part}".lstrip("/")
            local = self.project / folder
            is_other = local.is_symlink() or (os.path.lexists(local) and not local.is_dir())
            if is_other or is_run(local):  # another run may resume from what is there
                return PathState(exists=True)
            own = (own or folder in self.journal.folders or _is_empty(local)
                   or self._was_made(folder))  # fmt: skip
        journal = self.journal
        versions = (outputs.get(path) for outputs in (journal.outputs, journal.removed,
                                                      journal.pending))  # fmt: skip
        known = [output for output in versions if output is not None and not output.place
                 and output.is_unchanged(self._run, self.project)]  # fmt: skip
        exists = os.path.lexists(self.project / path)
        is_own = any(not output.is_adopted for output in known) or (
            exists and self._earlier.may_replace(path, before=before, is_adopted=bool(known))
        )
        return PathState(self._was_sent(path), exists, is_own, own)

    def _place(self, path: str, unplaced: str, state: PathState) -> bool:
        """Moves a file of the run directory into the project; whether that was possible."""
        assert self.project is not None
        try:
            self._make_folders(path)
            self._return_to_writer(path)
            move_file(self._run, unplaced, self.project, path, replace=state.exists)
        except OSError as problem:
            if problem.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            return False
        return True

    def _return_to_writer(self, path: str) -> bool:
        """Moves another run's file from the project to its run directory; whether it did.

        A later start of that run finds it there.
        """
        writer = self._earlier.writer(path) if self._earlier is not None else None
        if writer is None or self.project is None:
            return False
        run, output = writer
        if run not in self._run_records:
            self._run_records[run] = Arrivals(run), OutputJournal(run, LineSeals(run))
            self._run_records[run][0].mark_start()  # what is there is kept, under another name
        arrivals, journal = self._run_records[run]
        place = arrivals.place(f"{FETCHED}/{safe_name(output.host)}/{path}", output.host)
        os.close(safe_paths.open_folder(str(run), place.rpartition("/")[0], make=True))
        arrivals.set_aside(place, str(self.project / path))
        moved = replace(output, place=place)
        journal.add_pending([moved])
        move_file(self.project, path, run, place, replace=True)
        arrivals.record(place)
        journal.add([moved])
        self.returned.append(run / place)
        return True

    def restore(self) -> None:
        """Moves files that gave way to other runs back to the project: this run goes on. Blocking.

        The others' files move to their run directories.
        """
        journal = self.journal
        for output in list(journal.outputs.values()) if self.project is not None else ():
            was_placed = journal.versions.get(output.path) == (output.path, output.sha256)
            if not (output.place and was_placed and output.is_unchanged(self._run, self.project)):
                continue
            state = self._state(output.path)
            if kept_out_reason(output.path, state):
                continue
            restored = replace(output, place="", time=round(time.time(), 3))
            with contextlib.suppress(OSError):  # hosts get it from where it is
                journal.add_pending([restored])
                if self._place(output.path, output.place, state):
                    journal.add([restored])

    def foreign_checkpoints(self) -> list[str]:
        """Checkpoints of other runs that hosts get, if this run has its own. Blocking."""
        outputs = list(self.journal.outputs.values())
        if newest_checkpoint(outputs) is None:
            return []
        return sorted(output.path for output in outputs
                      if output.is_adopted and is_checkpoint(output.path, [output.path])
                      and output.is_unchanged(self._run, self.project))  # fmt: skip

    def _make_folders(self, path: str) -> None:
        """Makes the folders of a path in the project, as the user's umask says."""
        assert self.project is not None
        folder = ""
        for name in path.split("/")[:-1]:
            parent, folder = folder, f"{folder}/{name}".lstrip("/")
            local = self.project / folder
            is_missing = not os.path.lexists(local)
            is_known = any(folder == own or folder.startswith(f"{own}/")
                           for own in self.journal.folders)  # fmt: skip
            if not is_known and (is_missing or _is_empty(local) or self._was_made(folder)):
                self.journal.add_folder(folder)
            if is_missing:
                parent_fd = safe_paths.open_folder(str(self.project), parent)
                try:
                    os.mkdir(name, dir_fd=parent_fd)
                finally:
                    os.close(parent_fd)

    def _was_made(self, folder: str) -> bool:
        return self._earlier is not None and self._earlier.made_folder(folder)

    def _place_outside(self, host: str, path: str) -> str:
        """The place in the run directory for a file that may not arrive in the project."""
        if self._arrivals is None:
            self._arrivals = Arrivals(self._run)
        if path.startswith(RUN_PREFIX):
            return self._arrivals.place(path.removeprefix(RUN_PREFIX), host)
        return self._arrivals.place(f"{FETCHED}/{safe_name(host)}/{path}", host)

    def _keep_out(self, output: Output, unplaced: str) -> None:
        """Moves a received file to its place in the run directory."""
        assert self._arrivals is not None
        self._arrivals.set_aside(output.place, str(self._run / unplaced))
        safe_paths.rename(str(self._run), unplaced, output.place, durable=False)
        self._arrivals.record(output.place)
        if self.project is not None and not output.path.startswith(RUN_PREFIX):
            self.kept_out[output.path] = output.place

    def add_refused(self, host: str, paths: Iterable[str]) -> set[str]:
        """Adds files of rank 0's host below ``files/`` whose names no file in the project may have.

        Returns their paths. Hidden files are named last.
        """
        folder = f"{FETCHED}/{safe_name(host)}"
        refused = {path for path in paths if not self.travels(path)
                   and os.path.lexists(self._run / folder / path)}  # fmt: skip
        for path in sorted(refused, key=lambda path: (f"/{path}".count("/."), path)):
            self.kept_out.setdefault(path, f"{folder}/{path}")
        return refused

    def note_kept_out(self) -> None:
        """Names the files that did not arrive in the project, and those that gave way there."""
        if self.returned:
            files = pluralize(len(self.returned), "file")
            self._note(f"paceline: {files} of earlier runs gave way to files of this run, and moved"
                       f" to: {format_paths([*map(short, self.returned)])}")  # fmt: skip
            self.returned.clear()
        places: dict[bool, list[str]] = {True: [], False: []}
        for path, place in self.kept_out.items():
            is_taken = self.project is not None and os.path.lexists(self.project / path)
            places[is_taken].append(short(self._run / place))
        self.kept_out.clear()
        if taken := places[True]:
            self._note(f"paceline: {pluralize(len(taken), 'file')} of the script did not replace"
                       f" files in the project: {format_paths(taken)}")  # fmt: skip
        if others := places[False]:
            self._note(f"paceline: {pluralize(len(others), 'file')} of the script, which may not be"
                       f" put into the project: {format_paths(others)}")  # fmt: skip

    def sendable(self, prefix: str) -> tuple[Manifest, dict[str, tuple[Path, int]]]:
        """Entries of the outputs that are here, and their local paths and times, by path.

        A checkpoint folder of which a file or a shard is missing is left out.

        Args:
            prefix: ``RUN_PREFIX`` for files of the run, empty for those of the project.
        """
        versions = {}
        for output in list(self.journal.outputs.values()):
            if output.path.startswith(RUN_PREFIX) != bool(prefix) or self._is_code(output.path):
                continue
            local = self._newest_copy(output)
            versions[output.path] = local, None if local is None else local_version(local)
        cut_off = {unit_of(path) for path, (_, version) in versions.items() if version is None}
        incomplete = self.incomplete()
        manifest: Manifest = []
        paths: dict[str, tuple[Path, int]] = {}
        for path, (local, version) in versions.items():
            if local is None or version is None or unit_of(path) in cut_off:
                continue
            if withheld_root(path, incomplete):
                continue
            output = self.journal.outputs[path]
            is_same = version == (output.size, output.local_mtime_us)
            if self.travels(path):
                with contextlib.suppress(OSError):
                    sha256 = output.sha256 if is_same else hash_file(local)
                    manifest.append([path, sha256, 0o644, version[0]])
                    paths[path] = local, version[1]
        return manifest, paths

    def _newest_copy(self, output: Output) -> Path | None:
        """Where the newest version is here: the user's own file may be newer than an output.

        Only if it is part of the code that hosts get, or where a version of this run was. A host
        may name any other file of the user as one that its script wrote.
        """
        local = output.local_path(self._run, self.project)
        if not output.place or self.project is None:
            return local
        own = self.project / output.path
        version = local_version(own)
        if version is None or version[1] <= output.mtime_us:
            return local
        if self._was_sent(output.path):
            return own
        # not if this version itself was there, and gave way to a file of another run
        was_placed = self.journal.versions.get(output.path, ("", output.sha256))[1] != output.sha256
        if was_placed and self._earlier is not None:
            return local if self._earlier.writer(output.path, refresh=True) else own
        return local


def format_paths(paths: Sequence[str]) -> str:
    """Lists the first paths, with an ellipsis if there are more."""
    return ", ".join(paths[:MAX_NAMED]) + (", …" if len(paths) > MAX_NAMED else "")


def _is_of_run(path: str) -> bool:
    """Whether a path in a run directory is for the run's own files."""
    return is_reserved(path) or is_product(path) or path.startswith(f"{MODEL}/")


def _mtime_us(file: WrittenFile) -> int:
    return file.mtime_us


def _is_empty(folder: Path) -> bool:
    """Whether a folder is empty or missing."""
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is None
    except OSError:
        return not os.path.lexists(folder)
