"""Access to Hugging Face: one download for each disk, retries, and explanation of errors."""

from __future__ import annotations

import functools
import json
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
from paceline.recipes.data import SPLIT_NAMES, local_path
from paceline.spec.errors import DataError
from paceline.train import files
from paceline.train.data.disk_lock import exclusive_lock

T = TypeVar("T")
RETRY_DELAYS_S = (2.0, 8.0, 30.0)
"""Seconds before each retry after a transient error."""
ENDPOINT = "https://huggingface.co"
CONNECT_TIMEOUT_S = 3.0
"""Timeout for a connection to the hub."""
_MAX_YAML_BYTES = 2 << 20
"""Size of a YAML description; a byte of it can take 700 bytes of memory."""


def is_saved(folder: Path) -> bool:
    """Tells whether a folder is a data set written by ``save_to_disk``."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "dataset_info.json"))


def load_rows(name: str, config: str = "", offline: bool = False) -> dict[str, Any]:
    """Loads the rows of each part of a data set, given by id or folder.

    The parts are ``train``, and ``val`` and ``test`` if they exist.

    Raises:
        DataError: The data set is not found, refused, or has no train part.
    """
    path = local_path(Path(name).expanduser())
    prepare_environment(offline, path.is_dir())
    datasets = library("datasets", f"--data {name} is read")
    if path.is_dir():
        check_named_files(path)
    if is_saved(path):
        loaded = datasets.load_from_disk(str(path))
    else:
        location = str(path) if path.is_dir() else name
        loaded = fetch(
            f"--data {name}",
            lambda: datasets.load_dataset(location, config or None),
        )
    parts = dict(loaded) if isinstance(loaded, Mapping) else {"train": loaded}
    splits = {
        split: parts[spelling]
        for split, spellings in SPLIT_NAMES.items()
        for spelling in reversed(spellings)
        if spelling in parts
    }
    if "train" not in splits:
        raise DataError(
            f"--data {name} has no part to train on",
            found=f"it has {', '.join(parts) or 'none'}",
        )
    return splits


def check_named_files(folder: Path) -> None:
    """Raises DataError if a description in a data set's folder names files elsewhere, or URLs.

    Symbolic links are not refused: the hub's cache consists of them.
    """
    saved = ("dataset_dict.json", "state.json", "*/state.json")
    names = saved if is_saved(folder) else ("README.md", ".huggingface.yaml")
    for path in (path for name in names for path in folder.glob(name) if path.is_file()):
        try:
            outside = [text for text in _named_files(path) if _is_outside(text)]
        except Exception as error:  # of three parsers
            raise DataError(f"{path} cannot be read", found=str(error)[:200]) from None
        if outside:
            raise DataError(
                f"{path} names data outside of its folder",
                found=outside[0][:200],
                remedy="copy the data into the folder and name them by a path relative to it",
            )


def _named_files(path: Path) -> Iterator[str]:
    """Yields the files, patterns and folders that a description names, and also split names."""
    limit = files.MAX_DESCRIPTION_BYTES if path.suffix == ".json" else _MAX_YAML_BYTES
    content = files.read_bytes_limited(path, limit).decode("utf-8-sig")
    if path.suffix == ".json":
        values = json.loads(content)
        stack = [values.get("splits"), values.get("_data_files")]
    else:
        import huggingface_hub
        import yaml

        is_card = path.suffix == ".md"
        if is_card and not content.lstrip().startswith("---"):
            return
        values = huggingface_hub.DatasetCard(content).data if is_card else yaml.safe_load(content)
        configs = values.get("configs") if values else None
        stack = [config.get(key) for config in configs or () for key in ("data_files", "data_dir")]
    seen: set[int] = set()  # YAML may repeat a list, even in itself
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, (list, dict)) and id(value) not in seen:
            seen.add(id(value))
            stack += value.values() if isinstance(value, dict) else value


def _is_outside(pattern: str) -> bool:
    """Tells whether the ``datasets`` library would look for a pattern outside of the folder."""
    is_relative = not urlsplit(pattern).scheme and not pattern.startswith("/")
    return not is_relative or "://" in pattern or "::" in pattern or ".." in pattern.split("/")


def prepare_environment(offline: bool, local: bool = False) -> None:
    """Sets environment variables of Hugging Face's libraries, before they are imported.

    Uses only the cache if the hub cannot be reached, as the libraries would retry for a minute.

    Args:
        local: A folder is to be read, which needs no connection.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not offline and not local:
        offline = bool(connection_error())
    if offline:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
            os.environ[name] = "1"


@functools.cache
def connection_error() -> str:
    """Returns why the hub, or the proxy before it, cannot be reached; empty if it can."""
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or ENDPOINT)
    proxy = urllib.request.getproxies().get(endpoint.scheme)
    if proxy and not urllib.request.proxy_bypass(endpoint.hostname or ""):
        endpoint = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    outcome: queue.SimpleQueue[str] = queue.SimpleQueue()

    def connect() -> None:
        try:
            port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
            socket.create_connection((endpoint.hostname or "", port), CONNECT_TIMEOUT_S).close()
            outcome.put("")
        except (OSError, ValueError) as error:
            outcome.put(getattr(error, "strerror", None) or str(error))

    threading.Thread(target=connect, daemon=True).start()  # name resolution has no timeout
    try:
        reason = outcome.get(timeout=CONNECT_TIMEOUT_S)
    except queue.Empty:
        reason = f"no answer within {CONNECT_TIMEOUT_S:g} s"
    return reason and f"{endpoint.hostname}: {reason}"


def describe_cache() -> str:
    """Describes the content of the hub's cache."""
    cache = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    folders = [*cache.glob("hub/models--*"), *cache.glob("hub/datasets--*")]
    ids = sorted(folder.name.split("--", 1)[1].replace("--", "/") for folder in folders)
    summary = ", ".join(ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
    return f"{cache} holds {summary or 'nothing'}"


def fetch(label: str, get: Callable[[], T], sleep: Callable[[float], None] = time.sleep) -> T:
    """Calls ``get``, which uses the hub's cache, in one process of a disk at a time.

    The first process downloads, the others find the files in the cache. Retries after transient
    errors (HTTP 429 or 5xx, a lost connection).

    Raises:
        DataError: Explains the failure.
    """
    with _cache_lock():
        for delay in (*RETRY_DELAYS_S, None):
            try:
                return get()
            except Exception as error:  # several libraries, each with its own exceptions
                if delay is None or not _is_transient(error):
                    raise explain_error(label, error) from error
                sleep(delay)
    raise AssertionError("unreachable")


@contextmanager
def _cache_lock() -> Iterator[None]:
    folder = os.environ.get("HF_HOME", str(Path("~/.cache/huggingface").expanduser()))
    path = Path(folder) / "paceline.lock"
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(exclusive_lock(path))
        except OSError as error:
            raise DataError(
                f"the cache {folder} cannot be written",
                found=str(error),
                remedy="HF_HOME=FOLDER names another one",
            ) from None
        yield


def _status(error: BaseException) -> int:
    response = getattr(error, "response", None)
    return int(getattr(response, "status_code", 0) or 0)


def _chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _is_transient(error: Exception) -> bool:
    statuses = [_status(cause) for cause in _chain(error)]
    names = {type(cause).__name__ for cause in _chain(error)}
    transient = {"ConnectTimeout", "ReadTimeout", "RemoteProtocolError", "ReadError"}
    return any(status == 429 or status >= 500 for status in statuses) or bool(names & transient)


def explain_error(label: str, error: Exception) -> DataError:
    """Explains an error of the hub, with a remedy."""
    if connection_error.cache_info().currsize and (reason := connection_error()):
        return DataError(
            f"{label} is no local path and not in the cache, and the hub cannot be reached",
            found=f"tried {reason}; the cache {describe_cache()}",
            remedy="HTTPS_PROXY=http://HOST:PORT for a proxy, HF_HOME=FOLDER for another cache, or"
            " copy the files here and give their folder instead of the id",
        )
    status = next((code for cause in _chain(error) if (code := _status(cause))), 0)
    names = {type(cause).__name__ for cause in _chain(error)}
    if "trust_remote_code" in str(error):
        return DataError(
            f"{label} needs code that comes with it, which Paceline does not run",
            remedy="choose a model whose architecture transformers has itself",
        )
    message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return DataError(f"{label} could not be loaded", found=message, remedy=_remedy(status, names))


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
