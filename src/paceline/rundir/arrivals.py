"""Which place in a run's folder a file from another machine gets, and what it may replace.

Only what a run has made or brought is replaced. Somebody's project may be the folder (``--run-dir
.``): there, new files of ranks lie below ``files/HOST``, where no program looks for code.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from paceline.agent import inside
from paceline.rundir import records
from paceline.spec import rundir as names

_INPUT = re.compile(r"input[0-9]+")  # what a run that is left was given
_MOST_BYTES = 64 << 20  # of the record


class Arrivals:
    """The places, with a record in the folder of what was brought.

    Args:
        folder: A run's folder, which exists. Whether it is the runs' own is found out the first
            time: it holds nothing else.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._brought: set[str] = set()
        self._own = self._is_own()
        try:
            with records.open_regular(folder / names.BROUGHT) as file:
                lines = file.read(_MOST_BYTES).split(b"\n")
        except FileNotFoundError:
            self._write({"own": self._own})
            self._take_over()
            return
        for line in lines:
            said = records.parsed(line.decode("utf-8", "replace"))
            if isinstance(said, str):
                self._brought.add(said)
            elif isinstance(said, dict):
                self._own = said.get("own") is True

    def _is_own(self) -> bool:
        ours = {names.MODEL, *names.PRODUCTS}
        return all(
            path.name in ours or names.is_ours(path.name) or _INPUT.fullmatch(path.name)
            for path in self._folder.iterdir()
        )

    def _take_over(self) -> None:
        """Of a run without a record, as earlier versions left them, the model was brought."""
        described = records.read_object(self._folder / names.MODEL_CONFIG) or {}
        if (self._folder / names.EVENTS).exists() and "sha256" in described:
            for file in (self._folder / names.MODEL).iterdir():
                path = f"{names.MODEL}/{file.name}"
                if names.is_product(path):
                    self._brought.add(path)
                    self._write(path)

    def place(self, path: str, host: str) -> str:
        """Where below the folder a file of a host is to be.

        Args:
            path: As the host names it; :func:`inside.why_refused` has nothing against it.
            host: Its name.
        """
        if names.is_product(path) and (self._own or not self._is_foreign(path)):
            return path
        if (self._own or path.startswith(f"{names.FETCHED}/")) and not self._is_foreign(path):
            return path
        inner, number = path.removeprefix(f"{names.FETCHED}/"), 1
        while True:
            called = f"{names.safe(host)}-{number}" if number > 1 else names.safe(host)
            place = f"{names.FETCHED}/{called}/{inner}"
            if not self._is_foreign(place):
                return place
            number += 1

    def _is_foreign(self, path: str) -> bool:
        return path not in self._brought and os.path.lexists(self._folder / path)

    def brought(self, place: str) -> None:
        """A file has come: the next may replace it."""
        if place not in self._brought and not names.is_product(place):
            self._write(place)
        self._brought.add(place)

    def _write(self, line: object) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        file = inside.open_file(str(self._folder), names.BROUGHT, flags)
        try:
            inside.write_all(file, json.dumps(line).encode() + b"\n")
        finally:
            os.close(file)
