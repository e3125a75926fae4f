"""Tests downloads of named data sets from a local web server that fails in all known ways."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.recipes.data import (
    IMAGE_SETS,
    PAIR_SETS,
    TEXT_SETS,
    NamedDataset,
    Remote,
    download,
)
from paceline.recipes.data.download import DownloadOptions, find_or_download
from paceline.recipes.data.pairs import load_pairs
from paceline.recipes.data.texts import load_texts
from paceline.recipes.options import TextOptions, TranslationOptions
from paceline.spec.errors import DataError
from paceline.train.data import disk_lock

CONTENT = bytes(range(256)) * 4096  # 1 MiB


class Server(ThreadingHTTPServer):
    """Serves ``files``; ``faults`` has one fault for each request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.faults: list[str] = []
        self.asked: list[tuple[str, str]] = []
        self.is_open = threading.Event()  # requests wait while it is cleared
        self.is_open.set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        requested_range = self.headers.get("Range", "")
        self.server.asked.append((self.path, requested_range))
        fault = self.server.faults.pop(0) if self.server.faults else ""
        assert self.server.is_open.wait(20)
        content = self.server.files.get(self.path)
        if fault.isdecimal() or content is None:
            self.send_error(int(fault or 404))
            return
        if fault == "redirect":
            self.send_response(302)
            self.send_header("Location", f"{self.server.address}/elsewhere{self.path}")
            self.end_headers()
            return
        start = int(requested_range[6:-1]) if requested_range and fault != "no ranges" else 0
        if start and start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            part = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.send_header("Content-Range", part if fault != "other part" else "bytes 7-9/10")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        body = content[start:]
        if fault == "damaged":
            body = body[:-1] + b"?"
        self.wfile.write(body[: len(body) // 2] if fault == "cut" else body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _isolated_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "SEARCH_FOLDERS", ())


def sha(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def named_dataset(
    *sources: str, content: bytes = CONTENT, size: int = len(CONTENT)
) -> NamedDataset:
    remote = Remote("x.bin", sha(content), tuple(f"{entry}/" for entry in sources), size)
    return NamedDataset("set", "idx", ("set",), "a set", "put it there by hand", remote=(remote,))


class Log:
    """Download options that record messages and waiting times."""

    def __init__(self, **kwargs: Any) -> None:
        self.said: list[str] = []
        self.waited: list[float] = []
        self.ways = DownloadOptions(log=self.said.append, sleep=self.waited.append, **kwargs)


def is_complete(folder: Path) -> bool:
    return (folder / "x.bin").is_file()


def get(dataset: NamedDataset, log: Log, data_dir: str = "") -> bytes:
    return (find_or_download(dataset, data_dir, is_complete, log.ways) / "x.bin").read_bytes()


def test_downloads_dataset_once(server: Server, tmp_path: Path) -> None:
    server.files["/x.bin"] = CONTENT
    log = Log()
    assert get(named_dataset(server.address), log) == CONTENT
    assert get(named_dataset(server.address), log) == CONTENT
    assert len(server.asked) == 1
    assert "downloading x.bin" in log.said[0]
    assert "1.0 MiB" in log.said[0]
    leftover = sorted(path.name for path in (tmp_path / "cache/paceline/datasets").iterdir())
    assert leftover == [".set.lock", "set"]


def test_downloads_into_data_dir(server: Server, tmp_path: Path) -> None:
    server.files["/x.bin"] = CONTENT
    assert get(named_dataset(server.address), Log(), str(tmp_path / "mine")) == CONTENT
    assert (tmp_path / "mine/set/x.bin").is_file()


def test_resumes_interrupted_download(server: Server) -> None:
    server.files["/x.bin"] = CONTENT
    server.faults = ["cut", "cut"]
    log = Log()
    assert get(named_dataset(server.address), log) == CONTENT
    assert [requested_range for _, requested_range in server.asked] == [
        "",
        "bytes=524288-",
        "bytes=786432-",
    ]
    assert log.waited == [2.0, 2.0]  # every received byte counts as progress


def test_resumes_partial_file_of_killed_process(server: Server, tmp_path: Path) -> None:
    server.files["/x.bin"] = CONTENT
    parts = tmp_path / "cache/paceline/datasets/.set.part"
    parts.mkdir(parents=True)
    (parts / "x.bin.part").write_bytes(CONTENT[:1000])
    assert get(named_dataset(server.address), Log()) == CONTENT
    assert server.asked == [("/x.bin", "bytes=1000-")]


@pytest.mark.parametrize("leftover", [b"?" * 1000, b"?" * len(CONTENT), b"?" * (len(CONTENT) + 5)])
@pytest.mark.parametrize("size", [0, len(CONTENT)])
def test_replaces_corrupt_partial_file(
    server: Server, tmp_path: Path, leftover: bytes, size: int
) -> None:
    server.files["/x.bin"] = CONTENT
    parts = tmp_path / "cache/paceline/datasets/.set.part"
    parts.mkdir(parents=True)
    (parts / "x.bin.part").write_bytes(leftover)
    assert get(named_dataset(server.address, size=size), Log()) == CONTENT


def test_restarts_if_server_ignores_ranges(server: Server) -> None:
    server.files["/x.bin"] = CONTENT
    server.faults = ["cut", "no ranges"]
    assert get(named_dataset(server.address), Log()) == CONTENT


@pytest.mark.parametrize(
    "faults", [["damaged"], ["404"], ["403"], ["503"] * 4, ["cut", "other part"]]
)
def test_falls_back_to_next_source(server: Server, faults: list[str]) -> None:
    server.files["/x.bin"] = server.files["/second/x.bin"] = CONTENT
    server.faults = faults
    log = Log()
    assert get(named_dataset(server.address, f"{server.address}/second"), log) == CONTENT
    assert server.asked[-1][0] == "/second/x.bin"
    assert any(line.startswith("not from") for line in log.said)


def test_retries_busy_server(server: Server) -> None:
    server.files["/x.bin"] = CONTENT
    server.faults = ["503", "429", "redirect"]
    server.files["/elsewhere/x.bin"] = CONTENT
    log = Log()
    assert get(named_dataset(server.address), log) == CONTENT
    assert log.waited == [2.0, 8.0]
    assert server.asked[-1][0] == "/elsewhere/x.bin"


def test_tries_mirror_first(server: Server) -> None:
    server.files["/mirror/set/x.bin"] = CONTENT
    log = Log(mirror=f"{server.address}/mirror/")
    assert get(named_dataset("http://127.0.0.1:1"), log) == CONTENT
    assert server.asked == [("/mirror/set/x.bin", "")]


def test_falls_back_if_mirror_lacks_file(server: Server) -> None:
    server.files["/x.bin"] = CONTENT
    log = Log(mirror=f"{server.address}/mirror")
    assert get(named_dataset(server.address), log) == CONTENT


def test_reports_unreachable_sources(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x.bin of set cannot be downloaded") as caught:
        get(named_dataset("http://127.0.0.1:1", "http://no.such.host.invalid"), log := Log())
    assert "refused" in caught.value.render()
    assert "no.such.host.invalid" in caught.value.render()
    assert "put it there by hand" in caught.value.render()
    assert log.waited == []  # no waiting for a missing server


def test_rejects_dataset_with_wrong_checksum(server: Server, tmp_path: Path) -> None:
    server.files["/x.bin"] = b"other" * 1000
    with pytest.raises(DataError, match="checksum"):
        get(named_dataset(server.address, size=0), Log())
    assert not (tmp_path / "cache/paceline/datasets/set").exists()


def test_rejects_oversized_download(server: Server) -> None:
    server.files["/x.bin"] = CONTENT * 2
    with pytest.raises(DataError, match="more than the 1048576 bytes"):
        get(named_dataset(server.address), Log())


def test_offline_sends_no_request(server: Server) -> None:
    server.files["/x.bin"] = CONTENT
    with pytest.raises(DataError, match="--offline forbids"):
        get(named_dataset(server.address), Log(offline=True))
    assert server.asked == []


def test_reports_full_disk(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["/x.bin"] = CONTENT
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: type("U", (), {"free": 1000})())
    with pytest.raises(DataError, match=r"1.0 MiB are needed, and 0.0 MiB are free"):
        get(named_dataset(server.address), Log())


def run_concurrently(work: Callable[[], Any], count: int = 4) -> list[Any]:
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(work())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def test_concurrent_downloads_wait_for_first(server: Server) -> None:
    server.files["/x.bin"] = CONTENT
    server.faults = ["cut"]
    server.is_open.clear()
    log, waiting = Log(), []

    def note(line: str) -> None:
        if line.startswith("waiting for"):
            waiting.append(line)
        if len(waiting) == 3:
            server.is_open.set()

    log.ways = replace(log.ways, log=note)
    assert run_concurrently(lambda: get(named_dataset(server.address), log)) == [CONTENT] * 4
    assert len(server.asked) == 2
    assert len(waiting) == 3


def test_concurrent_downloads_without_file_locks(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["/x.bin"] = CONTENT
    monkeypatch.setattr(disk_lock, "_acquire", lambda file, waiting, path: False)
    assert run_concurrently(lambda: get(named_dataset(server.address), Log())) == [CONTENT] * 4


def make_archive(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in {**files, "._x": b"?"}.items():
            member = tarfile.TarInfo(f"some/folder/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("some/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return buffer.getvalue()


def test_unpacks_archives(server: Server) -> None:
    archives = {"a.tar.gz": make_archive(**{"x.bin": b"1"}), "b.tar.gz": make_archive(y=b"2")}
    server.files = {f"/{name}": content for name, content in archives.items()}
    remote = tuple(Remote(n, sha(c), (f"{server.address}/",)) for n, c in archives.items())
    folder = find_or_download(replace(named_dataset(), remote=remote), "", is_complete, Log().ways)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"x.bin": b"1", "y": b"2"}


def test_named_datasets_have_checksums() -> None:
    for entry in (*IMAGE_SETS.values(), *TEXT_SETS.values(), *PAIR_SETS.values()):
        assert entry.remote or entry.name in ("digits", "dummy")
        for remote in entry.remote:
            kind, _, digest = remote.digest.partition(":")
            assert len(digest) == {"sha256": 64, "md5": 32}[kind]
            assert all(base.startswith("http") and base.endswith("/") for base in remote.sources)


def serve_dataset(server: Server, entry: NamedDataset, files: dict[str, bytes]) -> NamedDataset:
    server.files = {f"/{name}": content for name, content in files.items()}
    remote = tuple(Remote(n, sha(c), (f"{server.address}/",)) for n, c in files.items())
    return replace(entry, remote=remote)


def test_loads_named_text_dataset(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = b'"3","Wall St.","Bears"\n"1","War","Peace"\n"2","Game","Set"\n"4","Moon","Rocket"\n'
    news = serve_dataset(server, TEXT_SETS["ag-news"], {"train.csv": rows, "test.csv": rows})
    monkeypatch.setitem(TEXT_SETS, "ag-news", news)
    data = load_texts(TextOptions(data="ag-news"))
    assert data.classes == ("World", "Sports", "Business", "Sci/Tech")
    assert data.splits["test"] == (["Wall St. Bears", "War Peace", "Game Set", "Moon Rocket"],
                                   [2, 0, 1, 3])  # fmt: skip


@pytest.mark.parametrize(("languages", "first"), [(("", ""), "ein"), (("en", "de"), "a")])
def test_loads_named_pair_dataset(
    server: Server, monkeypatch: pytest.MonkeyPatch, languages: tuple[str, str], first: str
) -> None:
    files = {
        f"{part}.tar.gz": make_archive(**{f"{part}.de": b"ein\n", f"{part}.en": b"a\n"})
        for part in ("train", "val", "test")
    }
    monkeypatch.setitem(PAIR_SETS, "multi30k", serve_dataset(server, PAIR_SETS["multi30k"], files))
    source, target = languages
    options = TranslationOptions(data="multi30k", source_lang=source, target_lang=target)
    data = load_pairs(options)
    assert data.splits["val"][0][0] == first
    assert set(data.splits) == {"train", "val", "test"}
