"""Chooses the path in a run directory for a file from another machine.

Only files of runs are replaced. Those that an earlier start brought are moved to
``files-before-DATE``, unless the new ones are equal. If the run directory is somebody's project
(``--run-dir .``), new files of ranks are put below ``files/HOST``. So are, in every run directory,
files that Python would run if it were started there or above. Code below ``files`` gets a name
under which no program looks for it: tests, for example, are looked for in all folders.
"""

from __future__ import annotations

import contextlib
import filecmp
import itertools
import json
import os
import re
import time
from pathlib import Path

from paceline.agent.files import safe_paths
from paceline.rundir import records
from paceline.rundir.output_rules import is_code, is_python_code
from paceline.spec import rundir as names

_INPUT = re.compile(r"input[0-9]+")  # files that a detached run was given
_MAX_RECORD_BYTES = 64 << 20
_MAX_NAME_BYTES = 255


class Arrivals:
    """Chooses paths, and records in the folder which files have arrived.

    Args:
        folder: An existing run directory. The first use determines whether it contains only files
            of runs.

    Attributes:
        has_backup: Whether a file of an earlier start was moved.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.has_backup = False
        self._arrived: set[str] = set()
        self._arrived_now: set[str] = set()  # since the current start
        self._start = ""  # its date and time
        self._is_exclusive = self._has_only_run_files()
        try:
            with records.open_regular(folder / names.FETCHED_LIST) as file:
                lines = file.read(_MAX_RECORD_BYTES).split(b"\n")
        except FileNotFoundError:
            self.mark_start()
            self._adopt_model()
            return
        for line in lines:
            entry = records.parse_json(line.decode("utf-8", "replace"))
            if isinstance(entry, str):
                self._arrived.add(entry)
                self._arrived_now.add(entry)
            elif isinstance(entry, dict):
                self._is_exclusive = entry.get("own") is True
                self._arrived_now, self._start = set(), names.safe_name(str(entry.get("start")))

    def mark_start(self) -> None:
        """Records that a job starts: what has arrived so far is of an earlier start."""
        date = time.strftime("%Y%m%d-%H%M%S")
        self._start, number = date, 1
        while (self._folder / self.backup_folder).exists():
            number += 1
            self._start = f"{date}-{number}"
        self._arrived_now = set()
        self._write({"own": self._is_exclusive, "start": self._start})

    def _has_only_run_files(self) -> bool:
        products = {names.MODEL, *names.PRODUCTS}
        return all(
            path.name in products
            or names.is_launcher_file(path.name)
            or _INPUT.fullmatch(path.name)
            for path in self._folder.iterdir()
        )

    def _adopt_model(self) -> None:
        """Counts the model of a run by an earlier version, which has no record, as arrived."""
        described = records.read_object(self._folder / names.MODEL_CONFIG) or {}
        if (self._folder / names.EVENTS).exists() and "sha256" in described:
            for file in (self._folder / names.MODEL).iterdir():
                path = f"{names.MODEL}/{file.name}"
                if names.is_product(path):
                    self._arrived.add(path)
                    self._write(path)

    def place(self, path: str, host: str) -> str:
        """The path below the folder for a file of a host, if no reason refuses its own path."""
        is_free = not self._is_foreign(path)
        is_product = names.is_product(path) and not is_python_code(path)
        if is_product and (self._is_exclusive or is_free):
            return path
        is_below = path.startswith(f"{names.FETCHED}/")
        if is_below and is_free and not is_code(path):
            return path
        if not is_below and self._is_exclusive and is_free and not is_python_code(path):
            return path
        # files of a copy of the code come with the folder of their host
        relative = path.removeprefix(f"{names.FETCHED}/{names.safe_name(host)}/")
        relative = relative.removeprefix(f"{names.FETCHED}/")
        if is_code(path):
            relative = _disguise(relative, host)
        folders = (names.safe_name(host) + (f"-{n}" if n > 1 else "") for n in itertools.count(1))
        candidates = (f"{names.FETCHED}/{folder}/{relative}" for folder in folders)
        return next(candidate for candidate in candidates if not self._is_foreign(candidate))

    def _is_foreign(self, path: str) -> bool:
        return path not in self._arrived and os.path.lexists(self._folder / path)

    @property
    def backup_folder(self) -> str:
        """The folder for files of earlier starts that this start replaces."""
        return f"{names.FETCHED}-before-{self._start}"

    def is_earlier(self, path: str) -> bool:
        """Whether an earlier start brought the file, and the current one has not replaced it."""
        return path in self._arrived and path not in self._arrived_now

    def set_aside(self, path: str, incoming: str) -> None:
        """Moves a file that an earlier start brought, unless the file that replaces it is equal.

        Threads may call it for different paths. No folder is removed, which another may need.

        Args:
            incoming: Path of the complete new file, which gets its name afterwards.
        """
        if not self.is_earlier(path):
            return
        target = f"{self.backup_folder}/{path}"
        if os.path.lexists(self._folder / target):  # moved by another follower
            return
        with contextlib.suppress(FileNotFoundError):  # removed by the user
            if not filecmp.cmp(incoming, self._folder / path, shallow=False):
                safe_paths.rename(str(self._folder), path, target, durable=False)
                self.has_backup = True

    def record(self, path: str) -> None:
        """Records that a file has arrived, so that the next may replace it."""
        if path not in self._arrived_now and not names.is_product(path):
            self._write(path)
        self._arrived_now.add(path)
        self._arrived.add(path)

    def _write(self, line: object) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        file = safe_paths.open_file(str(self._folder), names.FETCHED_LIST, flags)
        try:
            safe_paths.write_fully(file, json.dumps(line).encode() + b"\n")
        finally:
            os.close(file)


def _disguise(path: str, host: str) -> str:
    """Gives a file a name by which no program takes it for code, of at most 255 bytes."""
    folder, slash, name = path.rpartition("/")
    suffix = f".from-{names.safe_name(host).replace('.', '_')}"
    short = os.fsencode(name)[: _MAX_NAME_BYTES - len(os.fsencode(suffix))].decode(errors="ignore")
    return f"{folder}{slash}{short}{suffix}"
