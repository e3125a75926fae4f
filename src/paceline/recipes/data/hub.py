"""Hugging Face data sets by id or folder: fetched once on each disk, explained when refused."""

from __future__ import annotations

import functools
import os
import queue
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from paceline.program import library
from paceline.recipes.data import SPLIT_NAMES, HubSource, on_this_host
from paceline.spec.errors import DataError
from paceline.train.onedisk import one_at_a_time

T = TypeVar("T")
WAITS = (2.0, 8.0, 30.0)
"""Seconds before each further try of a request that was refused for the moment."""
ENDPOINT = "https://huggingface.co"
PATIENCE = 3.0
"""Seconds for a connection to the hub."""


def is_saved(folder: Path) -> bool:
    """True for a data set that ``datasets`` has written with ``save_to_disk``."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "dataset_info.json"))


def load_rows(source: HubSource) -> dict[str, Any]:
    """Rows of each part: ``train`` always, ``val`` and ``test`` where there are such.

    Raises:
        DataError: Not found, refused, or without a train part.
        SettingError: The library is not installed.
    """
    path = on_this_host(Path(source.name).expanduser())
    prepare_environment(source.offline, path.is_dir())
    datasets = library("datasets", f"--data {source.name} is read")
    if is_saved(path):
        found = datasets.load_from_disk(str(path))
    else:
        where = str(path) if path.is_dir() else source.name
        found = fetched(
            f"--data {source.name}", lambda: datasets.load_dataset(where, source.config or None)
        )
    parts = dict(found) if isinstance(found, Mapping) else {"train": found}
    return _named(source.name, parts)


def _named(name: str, parts: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        split: parts[spelling]
        for split, spellings in SPLIT_NAMES.items()
        for spelling in spellings
        if spelling in parts
    }
    if "train" not in found:
        raise DataError(
            f"--data {name} has no part to train on", found=f"it has {', '.join(parts) or 'none'}"
        )
    return found


def prepare_environment(offline: bool, local: bool = False) -> None:
    """Set before the libraries are imported, which read it once.

    Where nothing answers they would try for a minute; then only the cache is looked at.

    Args:
        offline: The network must not be touched.
        local: A folder is to be read, for which nobody is asked.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not offline and not local:
        offline = bool(unreachable())
    if offline:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
            os.environ[name] = "1"


@functools.cache
def unreachable() -> str:
    """Why no connection to the hub, or to the proxy before it, can be made; empty if one can.

    Known after some seconds. What else may be wrong with it, the libraries say.
    """
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or ENDPOINT)
    proxy = urllib.request.getproxies().get(endpoint.scheme)
    if proxy and not urllib.request.proxy_bypass(endpoint.hostname or ""):
        endpoint = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def connect() -> None:
        try:
            port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
            socket.create_connection((endpoint.hostname or "", port), PATIENCE).close()
            said.put("")
        except (OSError, ValueError) as error:
            said.put(getattr(error, "strerror", None) or str(error))

    threading.Thread(target=connect, daemon=True).start()  # looking up a name has no limit
    try:
        why = said.get(timeout=PATIENCE)
    except queue.Empty:
        why = f"no answer within {PATIENCE:g} s"
    return why and f"{endpoint.hostname}: {why}"


def cached() -> str:
    """What the hub's cache holds, for people."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    folders = [*home.glob("hub/models--*"), *home.glob("hub/datasets--*")]
    ids = sorted(folder.name.split("--", 1)[1].replace("--", "/") for folder in folders)
    shown = ", ".join(ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
    return f"{home} holds {shown or 'nothing'}"


def fetched(what: str, get: Callable[[], T], sleep: Callable[[float], None] = time.sleep) -> T:
    """Gets something through the hub's cache, one process of a disk at a time.

    The first process downloads; those that waited find the files in the cache. A refusal for the
    moment (HTTP 429 or 5xx, a connection cut) is tried again after a while.

    Raises:
        DataError: Says why not, and what to do.
    """
    with _alone():
        for wait in (*WAITS, None):
            try:
                return get()
            except Exception as error:  # several libraries, each with its own exceptions
                if wait is None or not _for_the_moment(error):
                    raise explained(what, error) from error
                sleep(wait)
    raise AssertionError("unreachable")


@contextmanager
def _alone() -> Iterator[None]:
    home = os.environ.get("HF_HOME", str(Path("~/.cache/huggingface").expanduser()))
    path = Path(home) / "paceline.lock"
    with ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(one_at_a_time(path))
        except OSError as error:
            raise DataError(
                f"the cache {home} cannot be written",
                found=str(error),
                remedy="HF_HOME=FOLDER names another one",
            ) from None
        yield


def _status(error: BaseException) -> int:
    response = getattr(error, "response", None)
    return int(getattr(response, "status_code", 0) or 0)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _for_the_moment(error: Exception) -> bool:
    statuses = [_status(one) for one in _chain(error)]
    names = {type(one).__name__ for one in _chain(error)}
    cut = {"ConnectTimeout", "ReadTimeout", "RemoteProtocolError", "ReadError"}
    return any(status == 429 or status >= 500 for status in statuses) or bool(names & cut)


def explained(what: str, error: Exception) -> DataError:
    """What the hub's error means, and what to do."""
    if unreachable.cache_info().currsize and (why := unreachable()):
        return DataError(
            f"{what} is not in the cache, and the hub cannot be reached",
            found=f"tried {why}; the cache {cached()}",
            remedy="HTTPS_PROXY=http://HOST:PORT for a proxy, HF_HOME=FOLDER for another cache, or"
            " copy the files here and give their folder instead of the id",
        )
    status = next((found for one in _chain(error) if (found := _status(one))), 0)
    names = {type(one).__name__ for one in _chain(error)}
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return DataError(f"{what} could not be loaded", found=said, remedy=_remedy(status, names))


def _remedy(status: int, names: set[str]) -> str:
    if status == 429:
        return "the hub limits how often one may ask: wait some minutes, or log in (HF_TOKEN)"
    if status >= 500:
        return "the hub has a fault at the moment: try again in some minutes"
    if status in (401, 403):
        return "log in with an account that may read it: HF_TOKEN=…, and accept its terms"
    if status == 404 or names & {"RepositoryNotFoundError", "DatasetNotFoundError"}:
        return "check the id, or give a local folder"
    if status == 407 or "ProxyError" in names:
        return "the proxy refuses: set HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT"
    if "OfflineModeIsEnabled" in names or "LocalEntryNotFoundError" in names:
        return "it is not in the cache, and --offline (or HF_HUB_OFFLINE) forbids fetching it"
    if names & {"ConnectError", "ConnectionError", "ConnectTimeout", "NewConnectionError"}:
        return "no route to the hub: HTTPS_PROXY=…, or copy the files here and give their folder"
    if "OSError" in names and status == 0:
        return "check the space in the cache (HF_HOME=FOLDER names another one) and the id"
    return "check the id, the configuration (--data-config NAME) and the network"
