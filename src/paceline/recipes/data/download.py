"""Download of named data sets, once for each disk, with resumption and checksums."""

from __future__ import annotations

import contextlib
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
from paceline.recipes.data import SEARCH_FOLDERS, NamedDataset, Remote
from paceline.spec.errors import DataError
from paceline.train.data.disk_lock import exclusive_lock, wait_until_exists

RETRY_DELAYS_S = (2.0, 8.0, 30.0)
"""Seconds before each retry, which resumes the download."""
TIMEOUT_S = 30.0
"""Seconds without data after which a connection is given up."""
_PROGRESS_INTERVAL_S = 10.0
_BLOCK_BYTES = 1 << 18
_MAX_BYTES = 1 << 40


def _print_status(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class DownloadOptions:
    """Settings of downloads.

    Attributes:
        mirror: URL that is tried first: ``MIRROR/NAME/FILE``; may be empty.
    """

    offline: bool = False
    mirror: str = ""
    log: Callable[[str], None] = field(default=_print_status, compare=False)
    sleep: Callable[[float], None] = field(default=time.sleep, compare=False)


def cache() -> Path:
    """Returns the cache of data sets, ``$XDG_CACHE_HOME/paceline/datasets``."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(base) / "paceline" / "datasets"


def find_or_download(
    dataset: NamedDataset,
    data_dir: str,
    is_complete: Callable[[Path], bool],
    options: DownloadOptions,
) -> Path:
    """Returns the folder of a named data set, after downloading it if necessary.

    Args:
        data_dir: Folder to search and download to, instead of the usual ones; may be empty.

    Raises:
        DataError: The data set is not found and cannot be downloaded.
    """
    for folder in _candidates(dataset, data_dir):
        if is_complete(folder):
            return folder
    searched = data_dir or ", ".join(map(str, (cache(), *SEARCH_FOLDERS)))
    if not dataset.remote or options.offline:
        forbidden = ", and --offline forbids downloading" if dataset.remote else ""
        raise DataError(
            f"the files of {dataset.name} were not found{forbidden}",
            found=f"looked under {searched}",
            remedy=dataset.get,
        )
    root = Path(data_dir).expanduser() if data_dir else cache()
    if not data_dir:
        with contextlib.suppress(OSError):  # `download` explains it
            for folder in [*reversed(root.parents), root]:
                folder.mkdir(mode=0o700, exist_ok=True)
    return download(dataset, root / dataset.folders[0], is_complete, options)


def _candidates(dataset: NamedDataset, data_dir: str) -> Iterator[Path]:
    """Yields folders to search; only those in --data-dir, so that a wrong one is an error."""
    parents = [data_dir] if data_dir else [str(cache()), *SEARCH_FOLDERS]
    if data_dir:
        yield Path(data_dir).expanduser()
    for parent in parents:
        for name in dataset.folders:
            yield Path(parent).expanduser() / name


def download(
    dataset: NamedDataset,
    target: Path,
    is_complete: Callable[[Path], bool],
    options: DownloadOptions,
) -> Path:
    """Downloads the files of a data set to the folder ``target``, which appears once complete.

    One process of a disk downloads, the others wait. A killed download is resumed.

    Raises:
        DataError: No source has the files, or the disk is full.
    """
    root = target.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        was_locked = False

        def waiting() -> None:
            nonlocal was_locked
            was_locked = True
            options.log(f"waiting for another process that downloads {dataset.name}")

        with exclusive_lock(root / f".{dataset.name}.lock", waiting) as has_lock:
            if wait_until_exists(target, is_complete, was_locked):
                return target
            suffix = (
                "" if has_lock else f".{secrets.token_hex(4)}"
            )  # without locks, each process has its own folder
            parts = root / f".{dataset.name}{suffix}.part"
            complete = parts / "whole"
            complete.mkdir(parents=True, exist_ok=True)
            for remote in dataset.remote:
                _add(dataset, remote, parts, complete, options)
            _move(complete, target)
            shutil.rmtree(parts, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"{dataset.name} cannot be kept in {root}",
            found=error.strerror or str(error),
            remedy="--data-dir FOLDER names a place with room, or XDG_CACHE_HOME another cache",
        ) from None
    options.log(f"{dataset.name} is in {target}")
    return target


def _add(
    dataset: NamedDataset, remote: Remote, parts: Path, folder: Path, options: DownloadOptions
) -> None:
    """Downloads a file, or the files of an archive, to ``folder``."""
    is_archive = remote.name.endswith(".tar.gz")
    path = (parts if is_archive else folder) / remote.name
    if not path.is_file():
        part = parts / f"{remote.name}.part"
        _fetch(dataset, remote, part, options)
        part.replace(path)
    if is_archive:
        _unpack(path, folder)
        path.unlink()
        path.touch()  # marks the archive as done if a later one fails


def _unpack(archive: Path, folder: Path) -> None:
    """Unpacks the files of an archive with a known checksum, without its folders."""
    if not archive.stat().st_size:  # the mark of an archive that was unpacked before
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            name = Path(member.name).name
            source = tar.extractfile(member) if member.isfile() and name[:1] != "." else None
            if source is not None:
                with source, (folder / name).open("wb") as file:
                    shutil.copyfileobj(source, file, _BLOCK_BYTES)


def _move(source: Path, target: Path) -> None:
    try:
        source.rename(target)
    except OSError:  # the target exists
        target.mkdir(exist_ok=True)
        for path in source.iterdir():
            path.replace(target / path.name)


class _SourceError(Exception):
    """The source does not have the file, or a wrong one."""


class _ConnectionLost(Exception):
    """The connection was lost; a retry may succeed."""


def _fetch(dataset: NamedDataset, remote: Remote, part: Path, options: DownloadOptions) -> None:
    """Downloads a file to ``part`` from the first source that has it."""
    mirror = [f"{options.mirror.rstrip('/')}/{dataset.name}/"] if options.mirror else []
    refusals = []
    for base in (*mirror, *remote.sources):
        try:
            return _fetch_from(base + remote.name, remote, part, options)
        except _SourceError as refusal:
            refusals.append(f"{base}{remote.name}: {refusal}")
            options.log(f"not from {refusals[-1]}")
    raise DataError(
        f"{remote.name} of {dataset.name} cannot be downloaded",
        found="\n".join(refusals),
        remedy=f"Type the command again to go on, or HTTPS_PROXY=http://HOST:PORT for a proxy, or"
        f" --mirror URL for another source, or {dataset.get}",
    )


def _fetch_from(url: str, remote: Remote, part: Path, options: DownloadOptions) -> None:
    is_resumed = _size(part) > 0
    delays = iter(RETRY_DELAYS_S)
    while True:
        size_before = _size(part)
        try:
            _request(url, remote, part, options)
        except _ConnectionLost as error:
            if _size(part) > size_before:
                delays = iter(RETRY_DELAYS_S)
            delay = next(delays, None)
            if delay is None:
                raise _SourceError(str(error)) from None
            options.sleep(delay)
            continue
        if _has_digest(part, remote):
            return
        size = _size(part)
        part.unlink()
        if not is_resumed:
            raise _SourceError(f"the {size} bytes from there do not have the known checksum")
        is_resumed = False  # the existing part may be of another source


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _has_digest(part: Path, remote: Remote) -> bool:
    kind, _, digest = remote.digest.partition(":")
    with part.open("rb") as file:
        checksum = hashlib.new(kind, usedforsecurity=False)
        for block in iter(lambda: file.read(_BLOCK_BYTES), b""):
            checksum.update(block)
        os.fsync(file.fileno())
    return checksum.hexdigest() == digest


def _request(url: str, remote: Remote, part: Path, options: DownloadOptions) -> None:
    """Requests what is missing of the file, and adds it."""
    offset = _size(part)
    if remote.size and offset >= remote.size:
        return
    headers = {"User-Agent": f"paceline/{__version__}", "Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
    try:
        request = urllib.request.Request(url, headers=headers)  # noqa: S310
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310
            _receive(response, url, remote, part, offset, options)
    except urllib.error.HTTPError as error:
        if error.code == 416 and offset:  # the part is complete or wrong: the checksum decides
            return
        if error.code in (408, 425, 429) or error.code >= 500:
            raise _ConnectionLost(f"HTTP {error.code} {error.reason}") from None
        raise _SourceError(f"HTTP {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        kind = _ConnectionLost if offset else _SourceError
        raise kind(getattr(error.reason, "strerror", None) or str(error.reason)) from None
    except (http.client.HTTPException, ConnectionError, TimeoutError) as error:
        raise _ConnectionLost(str(error) or type(error).__name__) from None


def _receive(
    response: http.client.HTTPResponse,
    url: str,
    remote: Remote,
    part: Path,
    offset: int,
    options: DownloadOptions,
) -> None:
    start = offset if response.status == 206 else 0
    if start and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
        raise _SourceError("the server sent another part than requested")
    length = response.headers.get("Content-Length", "")
    total = start + int(length) if length.isdecimal() else remote.size
    _check_free_space(part, total - start)
    progress = _Progress(f"{remote.name} from {url.split('/')[2]}", start, total, options.log)
    with part.open("r+b" if start else "wb") as file:
        file.seek(start)
        position = start
        while block := response.read(_BLOCK_BYTES):
            position += len(block)
            if position > (remote.size or _MAX_BYTES):
                raise _SourceError(f"there is more than the {remote.size} bytes that it has")
            file.write(block)
            progress.update(position)
    if position < total:
        raise _ConnectionLost(f"the connection was cut after {position} of {total} bytes")


def _check_free_space(part: Path, needed: int) -> None:
    free = shutil.disk_usage(part.parent).free
    if needed > free:
        raise OSError(f"{_mib(needed)} MiB are needed, and {_mib(free)} MiB are free")


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f}" if count >= 10 << 20 else f"{count / 2**20:.1f}"


class _Progress:
    """Reports the progress of a download at its start and at intervals."""

    def __init__(self, label: str, start: int, total: int, log: Callable[[str], None]) -> None:
        self._label, self._start, self._total, self._log = label, start, total, log
        self._start_time = self._report_time = time.monotonic()
        size = f" ({_mib(total)} MiB)" if total else ""
        log(f"downloading {label}{size}" + (f", from {_mib(start)} MiB on" if start else ""))

    def update(self, position: int) -> None:
        timestamp = time.monotonic()
        if timestamp - self._report_time < _PROGRESS_INTERVAL_S:
            return
        self._report_time = timestamp
        rate = (position - self._start) / (timestamp - self._start_time) / 2**20
        of = f" of {_mib(self._total)}" if self._total else ""
        self._log(f"downloading {self._label}: {_mib(position)}{of} MiB, {rate:.1f} MiB/s")
