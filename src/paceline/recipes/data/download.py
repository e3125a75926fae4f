"""Data sets of a name, downloaded once for each disk: resumed where cut, and checked."""

from __future__ import annotations

import hashlib
import http.client
import os
import secrets
import shutil
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paceline import __version__
from paceline.recipes.data import PLACES, Named, Remote
from paceline.spec.errors import DataError
from paceline.train.onedisk import appears, one_at_a_time

WAITS = (2.0, 8.0, 30.0)
"""Seconds before each further try of a server that has failed, from its last byte on."""
PATIENCE = 30.0
"""Seconds without a byte after which a connection counts as cut."""
_TELL_S = 10.0
_BLOCK = 1 << 18
_MOST_BYTES = 1 << 40


def _say(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Ways:
    """How data may be had.

    Attributes:
        offline: The network must not be touched.
        mirror: Address that is asked first: ``MIRROR/NAME/FILE``; may be empty.
        say: Tells people how far it is.
        sleep: Waits for some seconds.
    """

    offline: bool = False
    mirror: str = ""
    say: Callable[[str], None] = field(default=_say, compare=False)
    sleep: Callable[[float], None] = field(default=time.sleep, compare=False)


def cache() -> Path:
    """Where data sets are kept: ``$XDG_CACHE_HOME/paceline/datasets``."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(base) / "paceline" / "datasets"


def folder_of(
    named: Named, data_dir: str, is_whole: Callable[[Path], bool], ways: Ways | None = None
) -> Path:
    """The folder with the files of a named set: found, or downloaded.

    Args:
        named: The set.
        data_dir: Looked into instead of the usual places, and downloaded to; may be empty.
        is_whole: Whether a folder holds the set.
        ways: How it may be had.

    Raises:
        DataError: It is not here, and cannot be had.
    """
    ways = ways or Ways()
    for folder in _candidates(named, data_dir):
        if is_whole(folder):
            return folder
    looked = data_dir or ", ".join(map(str, (cache(), *PLACES)))
    if not named.remote or ways.offline:
        forbidden = ", and --offline forbids downloading" if named.remote else ""
        raise DataError(
            f"the files of {named.name} were not found{forbidden}",
            found=f"looked under {looked}",
            remedy=named.get,
        )
    root = Path(data_dir).expanduser() if data_dir else cache()
    return download(named, root / named.folders[0], is_whole, ways)


def _candidates(named: Named, data_dir: str) -> Iterator[Path]:
    """With --data-dir only there, so that a wrong one is not passed over silently."""
    places = [data_dir] if data_dir else [str(cache()), *PLACES]
    if data_dir:
        yield Path(data_dir).expanduser()
    for place in places:
        for name in named.folders:
            yield Path(place).expanduser() / name


def download(named: Named, target: Path, is_whole: Callable[[Path], bool], ways: Ways) -> Path:
    """Makes ``target`` out of the set's files; it has its name once all of them are there.

    One process of a disk downloads, the others wait. What a killed one has left is used.

    Raises:
        DataError: No source gives the files, or there is no room for them.
    """
    root = target.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        waited = False

        def waiting() -> None:
            nonlocal waited
            waited = True
            ways.say(f"waiting for another process that downloads {named.name}")

        with one_at_a_time(root / f".{named.name}.lock", waiting) as alone:
            if appears(target, is_whole, waited):
                return target
            own = "" if alone else f".{secrets.token_hex(4)}"  # without locks each for itself
            parts = root / f".{named.name}{own}.part"
            whole = parts / "whole"
            whole.mkdir(parents=True, exist_ok=True)
            for remote in named.remote:
                _add(named, remote, parts, whole, ways)
            _place(whole, target)
            shutil.rmtree(parts, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"{named.name} cannot be kept in {root}",
            found=error.strerror or str(error),
            remedy="--data-dir FOLDER names a place with room, or XDG_CACHE_HOME another cache",
        ) from None
    ways.say(f"{named.name} is in {target}")
    return target


def _add(named: Named, remote: Remote, parts: Path, whole: Path, ways: Ways) -> None:
    """Adds a file, or the files of an archive, to ``whole``."""
    packed = remote.name.endswith(".tar.gz")
    path = (parts if packed else whole) / remote.name
    if not path.is_file():
        part = parts / f"{remote.name}.part"
        _from_somewhere(named, remote, part, ways)
        part.replace(path)
    if packed:
        _unpack(path, whole)
        path.unlink()
        path.touch()  # so that this archive is not fetched again, should another one fail


def _unpack(archive: Path, folder: Path) -> None:
    """The archive's plain files, without its folders; its content is known to be the right one."""
    if not archive.stat().st_size:
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            name = Path(member.name).name
            source = tar.extractfile(member) if member.isfile() and name[:1] != "." else None
            if source is not None:
                with source, (folder / name).open("wb") as file:
                    shutil.copyfileobj(source, file, _BLOCK)


def _place(whole: Path, target: Path) -> None:
    try:
        whole.rename(target)
    except OSError:  # something has that name already
        target.mkdir(exist_ok=True)
        for path in whole.iterdir():
            path.replace(target / path.name)


# --- one file -----------------------------------------------------------------------------------


class _Refused(Exception):
    """This source does not have it, or not as it should be."""


class _Cut(Exception):
    """It may go on in a moment."""


def _from_somewhere(named: Named, remote: Remote, part: Path, ways: Ways) -> None:
    """Has the file at ``part``, checked, from the first source that gives it."""
    mirror = [f"{ways.mirror.rstrip('/')}/{named.name}/"] if ways.mirror else []
    refusals = []
    for base in (*mirror, *remote.sources):
        try:
            return _from_one(base + remote.name, remote, part, ways)
        except _Refused as refusal:
            refusals.append(f"{base}{remote.name}: {refusal}")
            ways.say(f"not from {refusals[-1]}")
    raise DataError(
        f"{remote.name} of {named.name} cannot be downloaded",
        found="\n".join(refusals),
        remedy=f"Type the command again to go on, or HTTPS_PROXY=http://HOST:PORT for a proxy, or"
        f" --mirror URL for another source, or {named.get}",
    )


def _from_one(url: str, remote: Remote, part: Path, ways: Ways) -> None:
    resumed = _size(part) > 0
    waits = iter(WAITS)
    while True:
        before = _size(part)
        try:
            _request(url, remote, part, ways)
        except _Cut as cut:
            if _size(part) > before:
                waits = iter(WAITS)
            wait = next(waits, None)
            if wait is None:
                raise _Refused(str(cut)) from None
            ways.sleep(wait)
            continue
        if _fits(part, remote):
            return
        found = _size(part)
        part.unlink()
        if not resumed:
            raise _Refused(f"the {found} bytes from there do not have the known checksum")
        resumed = False  # what was there before may have been of another source


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _fits(part: Path, remote: Remote) -> bool:
    kind, _, digest = remote.digest.partition(":")
    with part.open("rb") as file:
        found = hashlib.new(kind, usedforsecurity=False)
        for block in iter(lambda: file.read(_BLOCK), b""):
            found.update(block)
        os.fsync(file.fileno())
    return found.hexdigest() == digest


def _request(url: str, remote: Remote, part: Path, ways: Ways) -> None:
    """Asks for what is missing of the file, and adds it.

    Raises:
        _Cut, _Refused: It did not come as a whole.
    """
    have = _size(part)
    if remote.size and have >= remote.size:
        return
    headers = {"User-Agent": f"paceline/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        asked = urllib.request.Request(url, headers=headers)  # noqa: S310
        with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:  # noqa: S310
            _take(answer, url, remote, part, have, ways)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing after what is here: the checksum will tell
            return
        if error.code in (408, 425, 429) or error.code >= 500:
            raise _Cut(f"HTTP {error.code} {error.reason}") from None
        raise _Refused(f"HTTP {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        kind = _Cut if have else _Refused
        raise kind(getattr(error.reason, "strerror", None) or str(error.reason)) from None
    except (http.client.HTTPException, ConnectionError, TimeoutError) as error:
        raise _Cut(str(error) or type(error).__name__) from None


def _take(
    answer: http.client.HTTPResponse, url: str, remote: Remote, part: Path, have: int, ways: Ways
) -> None:
    start = have if answer.status == 206 else 0
    if start and not answer.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
        raise _Refused("another part came than was asked for")
    length = answer.headers.get("Content-Length", "")
    total = start + int(length) if length.isdecimal() else remote.size
    _check_room(part, total - start)
    progress = _Progress(f"{remote.name} from {url.split('/')[2]}", start, total, ways.say)
    with part.open("r+b" if start else "wb") as file:
        file.seek(start)
        at = start
        while block := answer.read(_BLOCK):
            at += len(block)
            if at > (remote.size or _MOST_BYTES):
                raise _Refused(f"there is more than the {remote.size} bytes that it has")
            file.write(block)
            progress.tell(at)
    if at < total:
        raise _Cut(f"the connection was cut after {at} of {total} bytes")


def _check_room(part: Path, needed: int) -> None:
    free = shutil.disk_usage(part.parent).free
    if needed > free:
        raise OSError(f"{_mib(needed)} MiB are needed, and {_mib(free)} MiB are free")


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f}" if count >= 10 << 20 else f"{count / 2**20:.1f}"


class _Progress:
    """Says how far a file is: when it begins, and from time to time."""

    def __init__(self, what: str, start: int, total: int, say: Callable[[str], None]) -> None:
        self._what, self._start, self._total, self._say = what, start, total, say
        self._begun = self._told = time.monotonic()
        size = f" ({_mib(total)} MiB)" if total else ""
        say(f"downloading {what}{size}" + (f", from {_mib(start)} MiB on" if start else ""))

    def tell(self, at: int) -> None:
        now = time.monotonic()
        if now - self._told < _TELL_S:
            return
        self._told = now
        rate = (at - self._start) / (now - self._begun) / 2**20
        of = f" of {_mib(self._total)}" if self._total else ""
        self._say(f"downloading {self._what}: {_mib(at)}{of} MiB, {rate:.1f} MiB/s")
