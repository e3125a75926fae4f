"""Tests parts of the agent: frames, processes, lease, addresses, facts, stored code, folders."""

from __future__ import annotations

import contextlib
import grp
import hashlib
import itertools
import json
import os
import pwd
import shutil
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.agent import bootstrap, frames
from paceline.agent.files import safe_paths, snapshot
from paceline.agent.files.blocks import Uploads
from paceline.agent.frames import HIGH_WATER_BYTES, MAGIC, Decoder, Outbox, encode
from paceline.agent.lease import Lease
from paceline.agent.ranks import forkserver, process, process_title
from paceline.agent.supervision import activation, processes
from paceline.agent.surveys import checks, facts, host_load, netlink, probe
from paceline.spec.schema import MAX_INTEGER

# --- frames

texts = st.text() | st.just("\udcff\udc80")
numbers = st.integers(-(10**19) + 1, 10**20 - 1)  # frames cannot hold larger numbers
values = st.none() | st.booleans() | numbers | texts | st.lists(texts)
messages = st.dictionaries(st.text(), values, max_size=4)
frame_lists = st.lists(st.tuples(messages, st.binary(max_size=300)), max_size=6)
noises = st.binary(max_size=60).filter(lambda b: MAGIC[:1] not in b)


def decode_all(decoder: Decoder, stream: bytes, cuts: list[int]) -> list[Any]:
    result: list[Any] = []
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    for start, end in itertools.pairwise(edges):
        result += decoder.feed(stream[start:end])
    return result


@given(frame_lists, st.lists(noises, min_size=7, max_size=7), st.lists(st.integers(0), max_size=20))
def test_decodes_frames_with_any_split_and_noise(
    sent: list[tuple[Any, bytes]], noise: list[bytes], cuts: list[int]
) -> None:
    stream = noise[0]
    for (message, blob), after in zip(sent, noise[1:], strict=False):
        stream += encode(message, blob) + after
    decoder = Decoder()
    assert decode_all(decoder, stream, cuts) == [(m, b) for m, b in sent]
    # the decoder has set aside all bytes that cannot begin a frame
    expected = b"".join(noise[: len(sent) + 1])
    assert expected.startswith(bytes(decoder.noise))
    assert len(expected) - len(decoder.noise) < len(MAGIC)


@given(st.lists(st.binary(max_size=40)), st.binary(max_size=20))
def test_decoder_survives_noise_that_looks_like_frame(parts: list[bytes], tail: bytes) -> None:
    stream = b"".join(part + MAGIC for part in parts) + tail
    decoder = Decoder()
    decoder.feed(stream)  # must not raise


def test_invalid_frame_does_not_hide_next_frame() -> None:
    invalid_frame = MAGIC + (5).to_bytes(4, "big") + (0).to_bytes(4, "big") + b"hello"
    huge = MAGIC + b"\xff\xff\xff\xff\xff\xff\xff\xff"
    valid_frame = encode({"a": 1}, b"blob")
    for before in (invalid_frame, huge, invalid_frame + huge):
        assert Decoder().feed(before + valid_frame) == [({"a": 1}, b"blob")]


def test_stored_noise_is_bounded() -> None:
    decoder = Decoder()
    decoder.feed(b"x" * 10_000)
    assert len(decoder.noise) == frames.MAX_NOISE_BYTES


# --- processes


@pytest.mark.parametrize(
    "name", ["python3", "a b", ") R 1 1 1", "(x) (y", "S 1 2 3 4)", "\n", "é\ufffd", ""]
)
def test_parse_stat_with_unusual_process_names(name: str) -> None:
    fields = "S 7 8 9 0 -1 4194560 1 0 0 0 1 2 3 4 20 0 1 0 123456 99 " + " ".join(["0"] * 30)
    result = processes.parse_stat(f"42 ({name}) {fields}\n")
    assert result == processes.Stat(42, 7, 9, "S", start=123456, cpu=10, faults=0, name=name)


def stat(pid: int, parent: int) -> processes.Stat:
    return processes.Stat(pid=pid, parent=parent, session=pid, state="S", start=pid * 10)


def test_descendants() -> None:
    stats = {s.pid: s for s in (stat(1, 0), stat(2, 1), stat(3, 2), stat(4, 3), stat(5, 1))}
    assert processes.descendants([2], stats) == {3, 4}
    assert processes.descendants([], stats) == set()
    assert processes.descendants([1], stats) == {2, 3, 4, 5}


def test_reused_pid_is_not_signalled() -> None:
    me = processes.identify(os.getpid())
    assert me is not None
    assert not processes.send(processes.Process(me.pid, me.start - 1), 0)
    assert processes.send(me, 0)


def test_job_environment() -> None:
    base = {"PATH": "/usr/bin", "HOME": "/root", "KEEP": "1"}
    base["PYTHONPATH"] = "/of/login"
    request = {"python": "/venv/bin/python", "env": {"NEW": "2"}, "unset": ["HOME"], "token": "t",
               "package": "/sent"}  # fmt: skip
    result = activation.job_environment(base, request)
    assert result.pop("PYTHONPATH") == "/sent:/of/login"
    assert result.pop("TORCHINDUCTOR_CACHE_DIR")  # a private folder
    assert result == {
        "PATH": "/venv/bin:/usr/bin",
        "KEEP": "1",
        "NEW": "2",
        "PACELINE_JOB_TOKEN": "t",
    }
    assert base["HOME"] == "/root"


# --- lease


def test_lease_without_renewal_does_not_end() -> None:
    assert not Lease().is_ending(1e9)


def test_lease_reserves_time_for_cleanup() -> None:
    lease = Lease()
    lease.renew(10.0, now=100.0)
    assert not lease.is_ending(106.9)
    assert lease.is_ending(107.1)
    assert lease.ending_s == pytest.approx(3.0)
    lease.renew(10.0, now=107.0)
    assert not lease.is_ending(110.0)


@given(st.floats(2, 1000), st.floats(0, 1e6))
def test_lease_is_ending_at_expiry(seconds: float, now: float) -> None:
    lease = Lease()
    lease.renew(seconds, now)
    assert not lease.is_ending(now)
    assert lease.is_ending(now + seconds)


# --- addresses

# recorded on a lab host: lo, dead0, ens3 with IPv4 and a tentative IPv6 address, docker0
DUMP = (Path(__file__).parent / "data" / "netlink_dump.hex").read_text()
NAMES = {1: "lo", 2: "dead0", 3: "ens3", 4: "docker0"}


def test_parse_netlink_dump() -> None:
    result = netlink.parse_dump(bytes.fromhex(DUMP), NAMES)
    ipv4 = [(a["interface"], a["address"], a["prefix"], a["scope"]) for a in result
            if a["family"] == 4]  # fmt: skip
    assert ipv4 == [
        ("lo", "127.0.0.1", 8, "host"),
        ("dead0", "10.66.0.11", 24, "global"),
        ("ens3", "10.77.0.11", 24, "global"),
        ("docker0", "172.17.0.1", 16, "global"),
    ]
    (tentative,) = [a for a in result if a["address"] == "fd00::5"]
    assert tentative["usable"] is False  # tentative: the address has just been assigned
    assert {a["scope"] for a in result if str(a["address"]).startswith("fe80")} == {"link"}


def test_unnamed_interface_gets_name() -> None:
    assert netlink.parse_dump(bytes.fromhex(DUMP), {})[0]["interface"] == "if1"


@given(st.binary(max_size=200), st.integers(0, 700))
def test_damaged_netlink_dumps_raise_known_errors(garbage: bytes, length: int) -> None:
    full_dump = bytes.fromhex(DUMP)
    for data in (garbage, full_dump[:length]):
        with contextlib.suppress(ValueError, OSError, struct.error):  # handled by the facts
            netlink.parse_dump(data, NAMES)


def test_addresses_include_loopback() -> None:
    assert "127.0.0.1" in {a["address"] for a in netlink.addresses()}


# --- facts


@pytest.mark.parametrize(
    ("text", "version", "cuda"),
    [
        ("__version__ = '2.13.0+cpu'\ndebug = False\ncuda: Optional[str] = None\n",
         "2.13.0+cpu", None),
        ("from typing import Optional\n__version__ = \"2.10.1\"\ncuda: Optional[str] = '12.8'\n"
         "hip: Optional[str] = None\n", "2.10.1", "12.8"),
        ("__all__ = ['__version__']\n", None, None),
    ],
)  # fmt: skip
def test_parse_torch_version(text: str, version: str, cuda: str) -> None:
    result = facts.parse_torch_version(text)
    assert (result["version"], result["cuda"]) == (version, cuda)


def test_finds_torch_on_sys_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.0'\n")
    monkeypatch.setattr(facts, "library_folders", list)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path)])
    result = facts.torch_facts()
    assert result is not None
    assert result["path"] == str(tmp_path / "torch")


def test_hosts_lines() -> None:
    text = "127.0.0.1 localhost\n127.0.1.1 n1.lan n1 # n9\n\n# 10.0.0.1 n1\n10.77.0.11\tn1\n"
    assert facts.hosts_lines(text, "n1") == ["2: 127.0.1.1 n1.lan n1 # n9", "5: 10.77.0.11\tn1"]
    assert facts.hosts_lines(text, "n1.lan")[0].startswith("2:")
    assert facts.hosts_lines(text, "n9") == []


def test_facts_are_json_serializable() -> None:
    result = facts.gather()
    assert result["errors"] == {}
    assert json.loads(json.dumps(result))["python"]["executable"]
    assert sorted(os.sched_getaffinity(0)) == result["cpu"]["available"]


def test_failing_fact_does_not_affect_other_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(2, "gone")

    monkeypatch.setitem(facts.FACTS, "memory", fail)
    result = facts.gather()
    assert result["memory"] is None
    assert "gone" in result["errors"]["memory"]
    assert result["cpu"]


def test_facts_of_huge_disk_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network disks report 8 EiB, which is more than an answer may say."""
    usage = SimpleNamespace(total=1 << 63, free=1 << 63)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    found = facts.disk_facts("/")
    assert max(found["total"], found["free"], facts.limit_facts()["shm"]) < MAX_INTEGER


def test_disk_facts_of_missing_folder(tmp_path: Path) -> None:
    result = facts.disk_facts(str(tmp_path / "a" / "b"))
    assert result["path"] == str(tmp_path)
    assert result["total"] > result["free"] > 0


def test_family_of_address() -> None:
    assert probe.family_of("::1") != probe.family_of("127.0.0.1")


# --- files stored by hash


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "paceline"


def test_remove_old_keeps_foreign_and_recent_folders(cache: Path, tmp_path: Path) -> None:
    """Files of other programs, and files behind links, are kept."""
    key, other, new_key = "a" * 24, "b" * 24, "c" * 24
    names = {
        "runs": [key, other, "my-notes", ".new-" + "0" * 8 + "-1-" + "0" * 16],
        "jobs": ["20260101-ab", "a job's"],
        "agent": ["d" * 64, "d" * 64 + ".new12", "tools"],
        "blobs": ["0f", "photos"],
    }
    outside = tmp_path / "elsewhere"
    (outside / key).mkdir(parents=True)
    for folder, children in names.items():
        for name in children:
            (cache / folder / name).mkdir(parents=True)
            (cache / folder / name / "file").write_text("x")
    (cache / "runs" / key / snapshot.MARK_FILE).write_text(key)
    (cache / "runs" / ("e" * 24)).symlink_to(outside / key)
    for path in [*tmp_path.rglob("*")]:
        os.utime(path, (0, 0), follow_symlinks=False)
    snapshot.make_run_folder(new_key)
    snapshot.remove_old(keep="", max_age_s=3600)
    remaining = {folder: {path.name for path in (cache / folder).iterdir()} for folder in names}
    assert remaining == {
        "runs": {other, "my-notes", "e" * 24, new_key},
        "jobs": {"a job's"},
        "agent": {"tools"},
        "blobs": {"photos"},
    }
    shutil.rmtree(cache / "runs")
    (cache / "runs").symlink_to(outside)
    (outside / key / snapshot.MARK_FILE).write_text(key)
    for path in (outside / key / snapshot.MARK_FILE, outside / key):
        os.utime(path, (0, 0))
    snapshot.remove_old(keep="", max_age_s=3600)
    assert (outside / key / snapshot.MARK_FILE).exists()


def test_remove_old_deletes_remains_of_killed_agent(cache: Path) -> None:
    boot, token = snapshot._pid_namespace(), "0" * 16
    nobody = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    foreign = f".new-{boot}-{os.getpid()}-{token}"  # being created by a live process
    foreign_name = (
        f".new-{'f' * 8}-{nobody}-{token}"  # created by another machine that shares the folder
    )
    for name in (f".new-{boot}-{nobody}-{token}", f".gone-{token}", foreign, foreign_name):
        (cache / "runs" / name).mkdir(parents=True)
    snapshot.remove_old(keep="", max_age_s=3600)
    assert {path.name for path in (cache / "runs").iterdir()} == {foreign, foreign_name}


def entry(path: str, content: bytes, mode: int = 0o644) -> list[Any]:
    return [path, hashlib.sha256(content).hexdigest(), mode, len(content)]


def store(content: bytes) -> None:
    digest = hashlib.sha256(content).hexdigest()
    cache = snapshot.cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    block = {"offset": 0, "last": True, "sha256": digest}
    Uploads().receive(str(cache), snapshot.blob_path(digest), block, content, False)


def test_cache_path_resolves_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "link").symlink_to("scratch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    folder = snapshot.job_folder("0123456789ab-01234567")
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert folder == Path.cwd()


def test_build_tree_from_blobs(cache: Path, tmp_path: Path) -> None:
    manifest = [entry("a.py", b"one"), entry("d/run.sh", b"two", 0o755), entry("copy", b"one")]
    assert len(snapshot.missing_hashes(manifest)) == 2
    store(b"one")
    store(b"two")
    assert snapshot.missing_hashes(manifest) == []
    root = tmp_path / "tree"
    snapshot.build_tree(str(root), manifest)
    assert (root / "copy").read_bytes() == b"one"
    assert (root / "d/run.sh").stat().st_mode & 0o777 == 0o755
    assert snapshot.compare(str(root), manifest) == {
        "exists": True, "missing": [], "different": [],
    }  # fmt: skip
    assert snapshot.changed_files(str(root), manifest) == []


def test_build_tree_makes_work_folder_without_files(cache: Path, tmp_path: Path) -> None:
    store(b"one")
    manifest = [entry("d/a.py", b"one")]
    for folder in ("d", "d/empty", "exp/1"):
        snapshot.build_tree(str(tmp_path / "tree"), manifest, workdir=folder)
        assert (tmp_path / "tree" / folder).is_dir()
        assert (tmp_path / "tree/d/a.py").is_file()
    for folder in ("../beside", "/beside", "d/../../beside", "d/a.py/x"):
        with pytest.raises((OSError, ValueError)):
            snapshot.build_tree(str(tmp_path / "other"), manifest, workdir=folder)
    assert not (tmp_path / "beside").exists()
    assert not (tmp_path / "other").exists()


def test_changed_files_of_job(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "changed").write_text("after!")
    (tmp_path / "new").write_text("")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__/x.pyc").write_text("")
    (tmp_path / "link").symlink_to("/etc/passwd")
    manifest = [entry("kept", b"kept"), entry("changed", b"before"), entry("gone", b"")]
    result = {file["path"] for file in snapshot.changed_files(str(tmp_path), manifest)}
    assert result == {"changed", "new"}


def test_compare_names_missing_and_different_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("other")
    manifest = [entry("a", b"wanted"), entry("b", b"")]
    result = snapshot.compare(str(tmp_path), manifest)
    assert (result["missing"], result["different"]) == (["b"], ["a"])
    assert snapshot.compare(str(tmp_path / "none"), manifest)["exists"] is False


def test_upload_rejects_wrong_hash(cache: Path) -> None:
    cache.mkdir(parents=True)
    block = {"offset": 0, "last": True, "sha256": "0" * 64}
    with pytest.raises(ValueError, match="hash"):
        Uploads().receive(str(cache), snapshot.blob_path("0" * 64), block, b"something", False)
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_damaged_blob_is_missing_for_next_tree(cache: Path, tmp_path: Path) -> None:
    store(b"good")
    manifest = [entry("f", b"good")]
    (blob,) = [path for path in cache.rglob("*") if path.is_file()]
    blob.write_bytes(b"evil")
    assert snapshot.build_tree(str(tmp_path / "t"), manifest) == [manifest[0][1]]
    assert not (tmp_path / "t").exists()
    assert snapshot.missing_hashes(manifest) == [manifest[0][1]]


# --- folders of runs

KEY = "0123456789abcdef01234567"
INVALID_KEYS = ["", "..", "../../../Documents", "/etc", "0123", KEY + "0", KEY.upper(), KEY + "\n",
           "0" * 23 + "/", "\udcff" * 24]  # fmt: skip


def test_run_folder_is_private_and_discardable(cache: Path) -> None:
    folder = snapshot.make_run_folder(KEY)
    assert folder == snapshot.make_run_folder(KEY)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert snapshot.changed_files(str(folder), None) == []
    (folder / "model").mkdir()
    assert not snapshot.discard_run_folder(KEY, only=())
    assert snapshot.discard_run_folder(KEY)
    assert list((cache / "runs").iterdir()) == []


def test_discards_empty_run_folder(cache: Path) -> None:
    snapshot.make_run_folder(KEY)
    assert snapshot.discard_run_folder(KEY, only=())
    assert list((cache / "runs").iterdir()) == []


@pytest.mark.parametrize("key", INVALID_KEYS)
def test_rejects_invalid_run_key(cache: Path, key: str) -> None:
    kept_folder = cache / "runs" / "kept"
    kept_folder.mkdir(parents=True)
    for work in (snapshot.run_folder, snapshot.make_run_folder, snapshot.discard_run_folder):
        with pytest.raises(ValueError, match="not the key"):
            work(key)
    assert kept_folder.exists()


@pytest.mark.parametrize("variant", ["no mark", "another mark", "link", "linked mark"])
def test_discard_keeps_folder_without_valid_mark(cache: Path, tmp_path: Path, variant: str) -> None:
    foreign = tmp_path / "theirs"
    foreign.mkdir()
    (foreign / "thesis").write_text("mine")
    folder = cache / "runs" / KEY
    folder.parent.mkdir(parents=True)
    if variant == "link":
        (foreign / snapshot.MARK_FILE).write_text(KEY)
        folder.symlink_to(foreign)
    else:
        foreign.rename(folder)
        if variant == "another mark":
            (folder / snapshot.MARK_FILE).write_text("f" * 24)
        elif variant == "linked mark":
            (tmp_path / "mark").write_text(KEY)
            (folder / snapshot.MARK_FILE).symlink_to(tmp_path / "mark")
    assert not snapshot.discard_run_folder(KEY)
    assert (folder / "thesis").read_text() == "mine"


def test_discard_does_not_follow_links(cache: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "theirs"
    foreign.mkdir()
    (foreign / "thesis").write_text("mine")
    (snapshot.make_run_folder(KEY) / "data").symlink_to(foreign)
    assert snapshot.discard_run_folder(KEY)
    assert (foreign / "thesis").read_text() == "mine"


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "", "a//b", "./x", "a\0b", "x" * 5000])
def test_rejects_path_outside_folder(tmp_path: Path, path: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for work in (lambda: safe_paths.write_file(str(root), path, b"x"),
                 lambda: safe_paths.rename(str(root), "a", path),
                 lambda: safe_paths.open_file(str(root), path, os.O_RDONLY)):  # fmt: skip
        with pytest.raises(ValueError, match="not a path inside"):
            work()
    assert list(tmp_path.iterdir()) == [root]


def test_safe_paths_do_not_follow_links(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    for folder in (root / "deep", other):
        folder.mkdir(parents=True)
    (other / "bashrc").write_text("theirs")
    (root / "file").symlink_to(other / "bashrc")
    (root / "deep" / "folder").symlink_to(other)
    for path in ("file", "deep/folder/bashrc", "deep/folder/new"):
        with pytest.raises(OSError, match="symbolic link"):
            os.close(safe_paths.open_file(str(root), path, os.O_WRONLY | os.O_APPEND | os.O_CREAT))
    safe_paths.write_file(str(root), "file", b"ours")  # replaces the link
    assert (root / "file").read_bytes() == b"ours"
    with pytest.raises(OSError, match="symbolic link"):
        safe_paths.write_file(str(root), "deep/folder/bashrc", b"ours")
    assert (other / "bashrc").read_text() == "theirs"
    assert [path.name for path in other.iterdir()] == ["bashrc"]


def test_open_file_does_not_block_on_named_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    for flags in (os.O_WRONLY | os.O_APPEND, os.O_RDONLY):
        with pytest.raises(OSError):
            safe_paths.open_file(str(tmp_path), "events.jsonl", flags)


# --- outgoing messages


def test_outbox_does_not_block() -> None:
    read, write = os.pipe()
    wake_read, wake_write = os.pipe()
    for fd in (write, wake_write):
        os.set_blocking(fd, False)
    try:
        outbox = Outbox(write, wake_write)
        outbox.post({"event": "output"}, bytes(HIGH_WATER_BYTES + (1 << 17)))
        outbox.flush()
        assert outbox.full
        os.close(read)
        outbox.flush()
        outbox.post({"n": 2})
        outbox.flush()
        assert outbox.broken
        assert outbox.empty
        outbox.post({"n": 3})
        assert outbox.empty
    finally:
        for fd in (write, wake_read, wake_write):
            os.close(fd)


def test_outbox_sends_in_order() -> None:
    read, write = os.pipe()
    wake_read, wake_write = os.pipe()
    try:
        outbox = Outbox(write, wake_write)
        for number in range(10):
            outbox.post({"n": number})
        outbox.flush()
        result = Decoder().feed(os.read(read, 1 << 16))
        assert [message["n"] for message, _ in result] == list(range(10))
    finally:
        for fd in (read, write, wake_read, wake_write):
            os.close(fd)


def test_frames_preserve_lone_surrogates() -> None:
    ((message, _),) = frames.Decoder().feed(encode({"arg": os.fsdecode(b"\xff a")}))
    assert os.fsencode(message["arg"]) == b"\xff a"


# --- the fork server's imports


def test_preload_of_optional_module() -> None:
    assert forkserver._preload(["json", "no_such_module?"])["event"] == "imported"
    assert "no_such_module" in forkserver._preload(["no_such_module"])["error"]


# --- process titles


def test_fit_line_keeps_suffix() -> None:
    assert process_title.fit_line(b"python a.py", b" [rank 1]", 100) == b"python a.py [rank 1]"
    assert (
        process_title.fit_line(b"python " + b"x" * 99, b" [rank 1]", 30)
        == b"python xxxxxxxxxx ... [rank 1]"
    )
    assert process_title.fit_line(b"a\nb\0c", b"", 30) == b"a b c"
    assert process_title.fit_line(b"a", b" [rank 1]", 5) == b""


def test_rank_title() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "4", "PACELINE_HOST": "n2"}
    entry = {"kind": "module", "target": "pkg.train", "args": ["--lr", "0.1"]}
    assert "".join(process_title.rank_title(entry, env)) == (
        "python -m pkg.train --lr 0.1 [rank 1 of 4, n2]"
    )  # fmt: skip


# --- load of a host


def write_kernel_files(root: Path) -> Path:
    """Writes files of ``/proc`` with known counters."""
    for name, text in {
        "proc/stat": "cpu  100 5 20 700 50 1 2 3 40 0\ncpu0 1 2 3\n",
        "proc/meminfo": "MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  250 kB\n",
        "proc/self/net/dev": "Inter-|   Receive\n face |bytes\n"
        "    lo: 7 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0\n"
        "  eth0: 500 1 0 0 0 0 0 0 90 1 0 0 0 0 0 0\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_read_load_counters(tmp_path: Path) -> None:
    result = host_load.read_counters(["eth0", "eth1"], write_kernel_files(tmp_path))
    assert result["cpu"] == [131, 881]
    assert result["memory"] == [1000 << 10, 250 << 10]
    assert result["links"] == {"eth0": [500, 90]}
    assert result["gpus"] == []
    (tmp_path / "empty").mkdir()
    empty_counters = host_load.read_counters(["eth0"], tmp_path / "empty")
    assert (empty_counters["cpu"], empty_counters["memory"], empty_counters["links"]) == (
        [0, 0],
        [0, 0],
        {},
    )


class Nvml:
    """Stands in for NVML with two GPUs, the second of which reports nothing."""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number: int, handle: Any) -> int:
        handle._obj.value = 1 + number
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> int:
        rates._obj.gpu = 87
        return 3 if handle.value == 2 else 0


def test_gpu_load() -> None:
    load = host_load.nvml(Nvml())
    assert load is not None
    assert load() == [0.87]
    broken = Nvml()
    broken.nvmlInit_v2 = lambda: 18  # type: ignore[method-assign]
    assert host_load.nvml(broken) is None


# --- whether other users could change files in a folder


@pytest.mark.parametrize(
    ("owners", "modes", "is_trusted"),
    [
        ({}, {}, True),
        ({"/": 65534}, {}, True),  # in a rootless container, where root has no user ID
        ({"/home": 65534}, {}, False),
        ({"/home/me": 1005}, {}, False),
        ({}, {"/home": 0o777}, False),
        ({}, {"/home": 0o1777}, True),
        ({}, {"/home/me": 0o775}, False),
        ({"/": 65534}, {"/": 0o777}, False),
    ],
)
def test_is_trusted_path(owners: dict[str, int], modes: dict[str, int], is_trusted: bool,
                                monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    me = 1001
    default_owners = {"/": 0, "/home": 0, "/home/me": me}

    def fake_lstat(path: str) -> os.stat_result:
        return os.stat_result(
            [modes.get(path, 0o755), 0, 0, 0, owners.get(path, default_owners[path]), 0, 0, 0, 0, 0]
        )

    monkeypatch.setattr(bootstrap.os, "lstat", fake_lstat)
    monkeypatch.setattr(bootstrap.os, "getuid", lambda: me)
    assert bootstrap.is_trusted_path("/home/me") is is_trusted


@pytest.mark.parametrize(("group", "members", "mode", "other_group", "is_trusted"), [
    ("me", [], 0o775, 8, True), ("me", ["me"], 0o770, 8, True),
    ("me", ["me", "you"], 0o775, 8, False), ("me", [], 0o775, 7, False),
    ("staff", [], 0o775, 8, False), ("me", [], 0o777, 8, False),
])  # fmt: skip
def test_trusts_folder_writable_by_private_group(
    group: str, members: list[str], mode: int, other_group: int, is_trusted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With the umask 002 of Debian and Red Hat, the user's own group can write ``~/.cache``."""
    status = os.stat_result([mode, 0, 0, 0, os.getuid(), 7, 0, 0, 0, 0])
    monkeypatch.setattr(bootstrap.os, "lstat", lambda _: status)
    users = [
        SimpleNamespace(pw_name="me", pw_uid=os.getuid(), pw_gid=7),
        SimpleNamespace(pw_name="you", pw_uid=os.getuid() + 1, pw_gid=other_group),
    ]
    monkeypatch.setattr(pwd, "getpwuid", lambda _: users[0])
    monkeypatch.setattr(pwd, "getpwall", lambda: users)
    monkeypatch.setattr(grp, "getgrgid", {7: SimpleNamespace(gr_name=group, gr_mem=members)}.get)
    assert bootstrap.is_trusted_path("/") is is_trusted


def test_find_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds the real name of the launcher, libraries in LD_LIBRARY_PATH, and invalid variables."""
    (tmp_path / "mpiexec.hydra").touch(mode=0o755)
    (tmp_path / "mpiexec").symlink_to("mpiexec.hydra")
    (tmp_path / "libfabric.so.1").touch()
    (tmp_path / "intel" / "oneapi").mkdir(parents=True)
    (tmp_path / "intel" / "oneapi" / "setvars.sh").touch()
    for name, value in (
        ("PATH", str(tmp_path)),
        ("HOME", str(tmp_path)),
        ("LD_LIBRARY_PATH", str(tmp_path)),
        ("FI_PROVIDER_PATH", f"{tmp_path}/gone"),
        ("I_MPI_ROOT", str(tmp_path)),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(checks, "SETVARS", checks.SETVARS[1:])
    assert checks.find_mpi() == {
        "mpiexec": str(tmp_path / "mpiexec.hydra"),
        "setvars": str(tmp_path / "intel" / "oneapi" / "setvars.sh"),
        "libfabric": str(tmp_path / "libfabric.so.1"),
        "missing_folders": {"FI_PROVIDER_PATH": f"{tmp_path}/gone"},
    }
    monkeypatch.setenv("PATH", str(tmp_path / "gone"))
    assert checks.find_mpi()["mpiexec"] == ""


def test_relative_pythonpath_follows_work_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python has resolved them against the folder in which the fork server started."""
    started, work = tmp_path / "home", tmp_path / "work"
    started.mkdir()
    work.mkdir()
    monkeypatch.chdir(started)
    monkeypatch.setenv("PYTHONPATH", f"src:{tmp_path}/absolute:lib/a")
    before = [str(started / "src"), f"{tmp_path}/absolute", str(started / "lib/a"), "/usr/lib"]
    monkeypatch.setattr(sys, "path", before)
    process.enter_folder(str(work))
    after = [str(work / "src"), f"{tmp_path}/absolute", str(work / "lib/a"), "/usr/lib"]
    assert sys.path == after
    assert Path.cwd() == work
