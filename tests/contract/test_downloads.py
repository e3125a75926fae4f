"""Data sets of a name, from a web server on this machine that fails in every way we know."""

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
    """Serves ``files``; what is to go wrong stands in ``faults``, one for each request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.faults: list[str] = []
        self.asked: list[tuple[str, str]] = []
        self.is_open = threading.Event()  # requests wait for it
        self.is_open.set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers.get("Range", "")
        self.server.asked.append((self.path, asked))
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
        start = int(asked[6:-1]) if asked and fault != "no ranges" else 0
        if start and start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            part = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.send_header("Content-Range", part if fault != "other part" else "bytes 7-9/10")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        rest = content[start:]
        if fault == "damaged":
            rest = rest[:-1] + b"?"
        self.wfile.write(rest[: len(rest) // 2] if fault == "cut" else rest)

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
def _nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "SEARCH_FOLDERS", ())


def sha(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def named(*sources: str, content: bytes = CONTENT, size: int = len(CONTENT)) -> NamedDataset:
    remote = Remote("x.bin", sha(content), tuple(f"{one}/" for one in sources), size)
    return NamedDataset("set", "idx", ("set",), "a set", "put it there by hand", remote=(remote,))


class Log:
    """Ways with everything that was said and waited for."""

    def __init__(self, **more: Any) -> None:
        self.said: list[str] = []
        self.waited: list[float] = []
        self.ways = DownloadOptions(log=self.said.append, sleep=self.waited.append, **more)


def is_whole(folder: Path) -> bool:
    return (folder / "x.bin").is_file()


def get(what: NamedDataset, log: Log, data_dir: str = "") -> bytes:
    return (find_or_download(what, data_dir, is_whole, log.ways) / "x.bin").read_bytes()


def test_a_set_is_downloaded_once(server: Server, tmp_path: Path) -> None:
    server.files["/x.bin"] = CONTENT
    log = Log()
    assert get(named(server.address), log) == CONTENT
    assert get(named(server.address), log) == CONTENT
    assert len(server.asked) == 1
    assert "downloading x.bin" in log.said[0]
    assert "1.0 MiB" in log.said[0]
    left = sorted(path.name for path in (tmp_path / "cache/paceline/datasets").iterdir())
    assert left == [".set.lock", "set"]


def test_into_the_named_folder(server: Server, tmp_path: Path) -> None:
    server.files["/x.bin"] = CONTENT
    assert get(named(server.address), Log(), str(tmp_path / "mine")) == CONTENT
    assert (tmp_path / "mine/set/x.bin").is_file()


def test_a_cut_download_goes_on_where_it_was(server: Server) -> None:
    server.files["/x.bin"] = CONTENT
    server.faults = ["cut", "cut"]
    log = Log()
    assert get(named(server.address), log) == CONTENT
    assert [asked for _, asked in server.asked] == ["", "bytes=524288-", "bytes=786432-"]
    assert log.waited == [2.0, 2.0]  # every byte that comes is progress


def test_what_a_killed_process_left_is_used(server: Server, tmp_path: Path) -> None:
    server.files["/x.bin"] = CONTENT
    parts = tmp_path / "cache/paceline/datasets/.set.part"
    parts.mkdir(parents=True)
    (parts / "x.bin.part").write_bytes(CONTENT[:1000])
    assert get(named(server.address), Log()) == CONTENT
    assert server.asked == [("/x.bin", "bytes=1000-")]


@pytest.mark.parametrize("left", [b"?" * 1000, b"?" * len(CONTENT), b"?" * (len(CONTENT) + 5)])
@pytest.mark.parametrize("size", [0, len(CONTENT)])
def test_left_rubbish_is_replaced(server: Server, tmp_path: Path, left: bytes, size: int) -> None:
    server.files["/x.bin"] = CONTENT
    parts = tmp_path / "cache/paceline/datasets/.set.part"
    parts.mkdir(parents=True)
    (parts / "x.bin.part").write_bytes(left)
    assert get(named(server.address, size=size), Log()) == CONTENT


def test_a_server_without_ranges_begins_again(server: Server) -> None:
    server.files["/x.bin"] = CONTENT
    server.faults = ["cut", "no ranges"]
    assert get(named(server.address), Log()) == CONTENT


@pytest.mark.parametrize(
    "faults", [["damaged"], ["404"], ["403"], ["503"] * 4, ["cut", "other part"]]
)
def test_the_next_source_is_asked(server: Server, faults: list[str]) -> None:
    server.files["/x.bin"] = server.files["/second/x.bin"] = CONTENT
    server.faults = faults
    log = Log()
    assert get(named(server.address, f"{server.address}/second"), log) == CONTENT
    assert server.asked[-1][0] == "/second/x.bin"
    assert any(line.startswith("not from") for line in log.said)


def test_a_busy_server_is_asked_again(server: Server) -> None:
    server.files["/x.bin"] = CONTENT
    server.faults = ["503", "429", "redirect"]
    server.files["/elsewhere/x.bin"] = CONTENT
    log = Log()
    assert get(named(server.address), log) == CONTENT
    assert log.waited == [2.0, 8.0]
    assert server.asked[-1][0] == "/elsewhere/x.bin"


def test_the_mirror_comes_first(server: Server) -> None:
    server.files["/mirror/set/x.bin"] = CONTENT
    log = Log(mirror=f"{server.address}/mirror/")
    assert get(named("http://127.0.0.1:1"), log) == CONTENT
    assert server.asked == [("/mirror/set/x.bin", "")]


def test_a_mirror_without_it_is_passed_over(server: Server) -> None:
    server.files["/x.bin"] = CONTENT
    log = Log(mirror=f"{server.address}/mirror")
    assert get(named(server.address), log) == CONTENT


def test_no_network(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x.bin of set cannot be downloaded") as told:
        get(named("http://127.0.0.1:1", "http://no.such.host.invalid"), log := Log())
    assert "refused" in told.value.render()
    assert "no.such.host.invalid" in told.value.render()
    assert "put it there by hand" in told.value.render()
    assert log.waited == []  # nobody waits for what is not there


def test_wrong_everywhere_is_no_data_set(server: Server, tmp_path: Path) -> None:
    server.files["/x.bin"] = b"other" * 1000
    with pytest.raises(DataError, match="checksum"):
        get(named(server.address, size=0), Log())
    assert not (tmp_path / "cache/paceline/datasets/set").exists()


def test_a_source_without_an_end(server: Server) -> None:
    server.files["/x.bin"] = CONTENT * 2
    with pytest.raises(DataError, match="more than the 1048576 bytes"):
        get(named(server.address), Log())


def test_offline_touches_no_network(server: Server) -> None:
    server.files["/x.bin"] = CONTENT
    with pytest.raises(DataError, match="--offline forbids"):
        get(named(server.address), Log(offline=True))
    assert server.asked == []


def test_a_full_disk(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["/x.bin"] = CONTENT
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: type("U", (), {"free": 1000})())
    with pytest.raises(DataError, match=r"1.0 MiB are needed, and 0.0 MiB are free"):
        get(named(server.address), Log())


def together(work: Callable[[], Any], count: int = 4) -> list[Any]:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(work())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_processes_of_a_disk_wait_for_the_first(server: Server) -> None:
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
    assert together(lambda: get(named(server.address), log)) == [CONTENT] * 4
    assert len(server.asked) == 2
    assert len(waiting) == 3


def test_a_disk_without_locks(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["/x.bin"] = CONTENT
    monkeypatch.setattr(disk_lock, "_acquire", lambda file, waiting, path: False)
    assert together(lambda: get(named(server.address), Log())) == [CONTENT] * 4


def packed(**files: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for name, content in {**files, "._x": b"?"}.items():
            about = tarfile.TarInfo(f"some/folder/{name}")
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
        link = tarfile.TarInfo("some/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return made.getvalue()


def test_archives_are_unpacked(server: Server) -> None:
    archives = {"a.tar.gz": packed(**{"x.bin": b"1"}), "b.tar.gz": packed(y=b"2")}
    server.files = {f"/{name}": content for name, content in archives.items()}
    remote = tuple(Remote(n, sha(c), (f"{server.address}/",)) for n, c in archives.items())
    folder = find_or_download(replace(named(), remote=remote), "", is_whole, Log().ways)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"x.bin": b"1", "y": b"2"}


def test_every_named_set_has_a_checksum() -> None:
    for one in (*IMAGE_SETS.values(), *TEXT_SETS.values(), *PAIR_SETS.values()):
        assert one.remote or one.name in ("digits", "dummy")
        for remote in one.remote:
            kind, _, digest = remote.digest.partition(":")
            assert len(digest) == {"sha256": 64, "md5": 32}[kind]
            assert all(base.startswith("http") and base.endswith("/") for base in remote.sources)


def served(server: Server, one: NamedDataset, files: dict[str, bytes]) -> NamedDataset:
    server.files = {f"/{name}": content for name, content in files.items()}
    remote = tuple(Remote(n, sha(c), (f"{server.address}/",)) for n, c in files.items())
    return replace(one, remote=remote)


def test_texts_of_a_name(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = b'"3","Wall St.","Bears"\n"1","War","Peace"\n"2","Game","Set"\n"4","Moon","Rocket"\n'
    news = served(server, TEXT_SETS["ag-news"], {"train.csv": rows, "test.csv": rows})
    monkeypatch.setitem(TEXT_SETS, "ag-news", news)
    data = load_texts(TextOptions(data="ag-news"))
    assert data.classes == ("World", "Sports", "Business", "Sci/Tech")
    assert data.splits["test"] == (["Wall St. Bears", "War Peace", "Game Set", "Moon Rocket"],
                                   [2, 0, 1, 3])  # fmt: skip


@pytest.mark.parametrize(("languages", "first"), [(("", ""), "ein"), (("en", "de"), "a")])
def test_pairs_of_a_name(
    server: Server, monkeypatch: pytest.MonkeyPatch, languages: tuple[str, str], first: str
) -> None:
    files = {
        f"{part}.tar.gz": packed(**{f"{part}.de": b"ein\n", f"{part}.en": b"a\n"})
        for part in ("train", "val", "test")
    }
    monkeypatch.setitem(PAIR_SETS, "multi30k", served(server, PAIR_SETS["multi30k"], files))
    source, target = languages
    options = TranslationOptions(data="multi30k", source_lang=source, target_lang=target)
    data = load_pairs(options)
    assert data.splits["val"][0][0] == first
    assert set(data.splits) == {"train", "val", "test"}
