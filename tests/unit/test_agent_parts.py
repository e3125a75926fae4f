"""The agent's pure parts: frames, process lists, addresses, facts, lease, code by content."""

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

# --- frames

texts = st.text() | st.just("\udcff\udc80")
numbers = st.integers(-(10**19) + 1, 10**20 - 1)  # a frame takes no longer ones
values = st.none() | st.booleans() | numbers | texts | st.lists(texts)
messages = st.dictionaries(st.text(), values, max_size=4)
frame_lists = st.lists(st.tuples(messages, st.binary(max_size=300)), max_size=6)
noises = st.binary(max_size=60).filter(lambda b: MAGIC[:1] not in b)


def decoded(decoder: Decoder, stream: bytes, cuts: list[int]) -> list[Any]:
    found: list[Any] = []
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    for start, end in itertools.pairwise(edges):
        found += decoder.feed(stream[start:end])
    return found


@given(frame_lists, st.lists(noises, min_size=7, max_size=7), st.lists(st.integers(0), max_size=20))
def test_any_split_and_any_noise(
    sent: list[tuple[Any, bytes]], noise: list[bytes], cuts: list[int]
) -> None:
    stream = noise[0]
    for (message, blob), after in zip(sent, noise[1:], strict=False):
        stream += encode(message, blob) + after
    decoder = Decoder()
    assert decoded(decoder, stream, cuts) == [(m, b) for m, b in sent]
    # all but what may be the beginning of a frame was put aside
    expected = b"".join(noise[: len(sent) + 1])
    assert expected.startswith(bytes(decoder.noise))
    assert len(expected) - len(decoder.noise) < len(MAGIC)


@given(st.lists(st.binary(max_size=40)), st.binary(max_size=20))
def test_noise_that_looks_like_a_frame(parts: list[bytes], tail: bytes) -> None:
    stream = b"".join(part + MAGIC for part in parts) + tail
    decoder = Decoder()
    decoder.feed(stream)  # whatever it is, it is no reason to break off


def test_a_false_frame_does_not_hide_the_next() -> None:
    false = MAGIC + (5).to_bytes(4, "big") + (0).to_bytes(4, "big") + b"hello"
    huge = MAGIC + b"\xff\xff\xff\xff\xff\xff\xff\xff"
    good = encode({"a": 1}, b"blob")
    for before in (false, huge, false + huge):
        assert Decoder().feed(before + good) == [({"a": 1}, b"blob")]


def test_kept_noise_is_bounded() -> None:
    decoder = Decoder()
    decoder.feed(b"x" * 10_000)
    assert len(decoder.noise) == frames.MAX_NOISE_BYTES


# --- processes


@pytest.mark.parametrize(
    "name", ["python3", "a b", ") R 1 1 1", "(x) (y", "S 1 2 3 4)", "\n", "é\ufffd", ""]
)
def test_a_process_may_be_called_anything(name: str) -> None:
    rest = "S 7 8 9 0 -1 4194560 1 0 0 0 1 2 3 4 20 0 1 0 123456 99 " + " ".join(["0"] * 30)
    found = processes.parse_stat(f"42 ({name}) {rest}\n")
    assert found == processes.Stat(42, 7, 9, "S", start=123456, cpu=10, faults=0, name=name)


def stat(pid: int, parent: int) -> processes.Stat:
    return processes.Stat(pid=pid, parent=parent, session=pid, state="S", start=pid * 10)


def test_descendants() -> None:
    stats = {s.pid: s for s in (stat(1, 0), stat(2, 1), stat(3, 2), stat(4, 3), stat(5, 1))}
    assert processes.descendants([2], stats) == {3, 4}
    assert processes.descendants([], stats) == set()
    assert processes.descendants([1], stats) == {2, 3, 4, 5}


def test_a_number_given_to_another_process_is_not_ours() -> None:
    me = processes.identify(os.getpid())
    assert me is not None
    assert not processes.send(processes.Process(me.pid, me.start - 1), 0)
    assert processes.send(me, 0)


def test_the_environment_of_ranks() -> None:
    base = {"PATH": "/usr/bin", "HOME": "/root", "KEEP": "1"}
    request = {"python": "/venv/bin/python", "env": {"NEW": "2"}, "unset": ["HOME"], "token": "t"}
    found = activation.job_environment(base, request)
    assert found.pop("TORCHINDUCTOR_CACHE_DIR")  # a folder that no other user can make first
    assert found == {
        "PATH": "/venv/bin:/usr/bin",
        "KEEP": "1",
        "NEW": "2",
        "PACELINE_JOB_TOKEN": "t",
    }
    assert base["HOME"] == "/root"


# --- lease


def test_a_lease_that_was_never_given_never_ends() -> None:
    assert not Lease().is_ending(1e9)


def test_a_lease_leaves_time_for_the_end() -> None:
    lease = Lease()
    lease.renew(10.0, now=100.0)
    assert not lease.is_ending(106.9)
    assert lease.is_ending(107.1)
    assert lease.ending_s == pytest.approx(3.0)
    lease.renew(10.0, now=107.0)
    assert not lease.is_ending(110.0)


@given(st.floats(2, 1000), st.floats(0, 1e6))
def test_the_end_begins_before_the_lease_is_over(seconds: float, now: float) -> None:
    lease = Lease()
    lease.renew(seconds, now)
    assert not lease.is_ending(now)
    assert lease.is_ending(now + seconds)


# --- addresses

# a lab host: lo, dead0, ens3 with IPv4 and a tentative IPv6 address, docker0
DUMP = (Path(__file__).parent / "data" / "netlink_dump.hex").read_text()
NAMES = {1: "lo", 2: "dead0", 3: "ens3", 4: "docker0"}


def test_the_kernels_dump_is_read() -> None:
    found = netlink.parse_dump(bytes.fromhex(DUMP), NAMES)
    four = [(a["interface"], a["address"], a["prefix"], a["scope"]) for a in found
            if a["family"] == 4]  # fmt: skip
    assert four == [
        ("lo", "127.0.0.1", 8, "host"),
        ("dead0", "10.66.0.11", 24, "global"),
        ("ens3", "10.77.0.11", 24, "global"),
        ("docker0", "172.17.0.1", 16, "global"),
    ]
    (own,) = [a for a in found if a["address"] == "fd00::5"]
    assert own["usable"] is False  # tentative: it was given a moment before
    assert {a["scope"] for a in found if str(a["address"]).startswith("fe80")} == {"link"}


def test_an_interface_without_a_name_gets_one() -> None:
    assert netlink.parse_dump(bytes.fromhex(DUMP), {})[0]["interface"] == "if1"


@given(st.binary(max_size=200), st.integers(0, 700))
def test_damaged_dumps_break_nothing(garbage: bytes, length: int) -> None:
    whole = bytes.fromhex(DUMP)
    for data in (garbage, whole[:length]):
        with contextlib.suppress(ValueError, OSError, struct.error):  # facts count on these
            netlink.parse_dump(data, NAMES)


def test_our_own_addresses() -> None:
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
def test_torch_versions_are_read_from_files(text: str, version: str, cuda: str) -> None:
    found = facts.parse_torch_version(text)
    assert (found["version"], found["cuda"]) == (version, cuda)


def test_a_torch_that_a_pth_file_leads_to_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.0'\n")
    monkeypatch.setattr(facts, "library_folders", list)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path)])
    found = facts.torch_facts()
    assert found is not None
    assert found["path"] == str(tmp_path / "torch")


def test_lines_of_hosts_files() -> None:
    text = "127.0.0.1 localhost\n127.0.1.1 n1.lan n1 # n9\n\n# 10.0.0.1 n1\n10.77.0.11\tn1\n"
    assert facts.hosts_lines(text, "n1") == ["2: 127.0.1.1 n1.lan n1 # n9", "5: 10.77.0.11\tn1"]
    assert facts.hosts_lines(text, "n1.lan")[0].startswith("2:")
    assert facts.hosts_lines(text, "n9") == []


def test_all_facts_can_be_told() -> None:
    found = facts.gather()
    assert found["errors"] == {}
    assert json.loads(json.dumps(found))["python"]["executable"]
    assert sorted(os.sched_getaffinity(0)) == found["cpu"]["available"]


def test_a_fact_that_fails_does_not_take_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(2, "gone")

    monkeypatch.setitem(facts.FACTS, "memory", fail)
    found = facts.gather()
    assert found["memory"] is None
    assert "gone" in found["errors"]["memory"]
    assert found["cpu"]


def test_disks_of_folders_that_are_not_there_yet(tmp_path: Path) -> None:
    found = facts.disk_facts(str(tmp_path / "a" / "b"))
    assert found["path"] == str(tmp_path)
    assert found["total"] > found["free"] > 0


def test_families() -> None:
    assert probe.family_of("::1") != probe.family_of("127.0.0.1")


# --- code by content


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "paceline"


def test_only_old_things_of_ours_are_forgotten(cache: Path, tmp_path: Path) -> None:
    """What somebody else put beside them, or reached through a link, stays."""
    key, other, fresh = "a" * 24, "b" * 24, "c" * 24
    names = {
        "runs": [key, other, "my-notes", ".new-" + "0" * 8 + "-1-" + "0" * 16],
        "jobs": ["20260101-ab", "a job's"],
        "agent": ["d" * 64, "d" * 64 + ".new12", "tools"],
        "blobs": ["0f", "photos"],
    }
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / key).mkdir(parents=True)
    for folder, children in names.items():
        for name in children:
            (cache / folder / name).mkdir(parents=True)
            (cache / folder / name / "file").write_text("x")
    (cache / "runs" / key / snapshot.MARK_FILE).write_text(key)
    (cache / "runs" / ("e" * 24)).symlink_to(elsewhere / key)
    for path in [*tmp_path.rglob("*")]:
        os.utime(path, (0, 0), follow_symlinks=False)
    snapshot.make_run_folder(fresh)
    snapshot.remove_old(keep="", max_age_s=3600)
    left = {folder: {path.name for path in (cache / folder).iterdir()} for folder in names}
    assert left == {
        "runs": {other, "my-notes", "e" * 24, fresh},
        "jobs": {"a job's"},
        "agent": {"tools"},
        "blobs": {"photos"},
    }
    shutil.rmtree(cache / "runs")
    (cache / "runs").symlink_to(elsewhere)
    (elsewhere / key / snapshot.MARK_FILE).write_text(key)
    for path in (elsewhere / key / snapshot.MARK_FILE, elsewhere / key):
        os.utime(path, (0, 0))
    snapshot.remove_old(keep="", max_age_s=3600)
    assert (elsewhere / key / snapshot.MARK_FILE).exists()


def test_what_a_killed_agent_left_half_done_goes_at_once(cache: Path) -> None:
    boot, token = snapshot._pid_namespace(), "0" * 16
    nobody = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    theirs = f".new-{boot}-{os.getpid()}-{token}"  # being made at this moment
    away = f".new-{'f' * 8}-{nobody}-{token}"  # by another machine that shares the folder
    for name in (f".new-{boot}-{nobody}-{token}", f".gone-{token}", theirs, away):
        (cache / "runs" / name).mkdir(parents=True)
    snapshot.remove_old(keep="", max_age_s=3600)
    assert {path.name for path in (cache / "runs").iterdir()} == {theirs, away}


def entry(path: str, content: bytes, mode: int = 0o644) -> list[Any]:
    return [path, hashlib.sha256(content).hexdigest(), mode, len(content)]


def store(content: bytes) -> None:
    digest = hashlib.sha256(content).hexdigest()
    cache = snapshot.cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    block = {"offset": 0, "last": True, "sha256": digest}
    Uploads().receive(str(cache), snapshot.blob_path(digest), block, content, False)


def test_a_linked_cache_has_the_path_that_processes_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "link").symlink_to("scratch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    folder = snapshot.job_folder("0123456789ab-01234567")
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert folder == Path.cwd()


def test_a_tree_is_built_from_contents(cache: Path, tmp_path: Path) -> None:
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


def test_what_a_job_wrote_is_found(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "changed").write_text("after!")
    (tmp_path / "new").write_text("")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__/x.pyc").write_text("")
    (tmp_path / "link").symlink_to("/etc/passwd")
    manifest = [entry("kept", b"kept"), entry("changed", b"before"), entry("gone", b"")]
    found = {file["path"] for file in snapshot.changed_files(str(tmp_path), manifest)}
    assert found == {"changed", "new"}


def test_differences_are_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("other")
    manifest = [entry("a", b"wanted"), entry("b", b"")]
    found = snapshot.compare(str(tmp_path), manifest)
    assert (found["missing"], found["different"]) == (["b"], ["a"])
    assert snapshot.compare(str(tmp_path / "none"), manifest)["exists"] is False


def test_content_that_is_not_what_its_name_says(cache: Path) -> None:
    cache.mkdir(parents=True)
    block = {"offset": 0, "last": True, "sha256": "0" * 64}
    with pytest.raises(ValueError, match="hash"):
        Uploads().receive(str(cache), snapshot.blob_path("0" * 64), block, b"something", False)
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_damaged_cache_is_noticed_and_forgotten(cache: Path, tmp_path: Path) -> None:
    store(b"good")
    manifest = [entry("f", b"good")]
    (blob,) = [path for path in cache.rglob("*") if path.is_file()]
    blob.write_bytes(b"evil")
    assert snapshot.build_tree(str(tmp_path / "t"), manifest) == [manifest[0][1]]
    assert not (tmp_path / "t").exists()
    assert snapshot.missing_hashes(manifest) == [manifest[0][1]]


# --- folders of runs

KEY = "0123456789abcdef01234567"
NO_KEYS = ["", "..", "../../../Documents", "/etc", "0123", KEY + "0", KEY.upper(), KEY + "\n",
           "0" * 23 + "/", "\udcff" * 24]  # fmt: skip


def test_a_folder_of_a_run_carries_our_mark(cache: Path) -> None:
    folder = snapshot.make_run_folder(KEY)
    assert folder == snapshot.make_run_folder(KEY)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert snapshot.changed_files(str(folder), None) == []
    (folder / "model").mkdir()
    assert not snapshot.discard_run_folder(KEY, only=())
    assert snapshot.discard_run_folder(KEY)
    assert list((cache / "runs").iterdir()) == []


def test_an_empty_folder_of_a_run_goes(cache: Path) -> None:
    snapshot.make_run_folder(KEY)
    assert snapshot.discard_run_folder(KEY, only=())
    assert list((cache / "runs").iterdir()) == []


@pytest.mark.parametrize("key", NO_KEYS)
def test_what_is_no_key_names_no_folder(cache: Path, key: str) -> None:
    kept = cache / "runs" / "kept"
    kept.mkdir(parents=True)
    for work in (snapshot.run_folder, snapshot.make_run_folder, snapshot.discard_run_folder):
        with pytest.raises(ValueError, match="not the key"):
            work(key)
    assert kept.exists()


@pytest.mark.parametrize("how", ["no mark", "another mark", "link", "linked mark"])
def test_a_folder_that_we_did_not_make_stays(cache: Path, tmp_path: Path, how: str) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis").write_text("mine")
    folder = cache / "runs" / KEY
    folder.parent.mkdir(parents=True)
    if how == "link":
        (theirs / snapshot.MARK_FILE).write_text(KEY)
        folder.symlink_to(theirs)
    else:
        theirs.rename(folder)
        if how == "another mark":
            (folder / snapshot.MARK_FILE).write_text("f" * 24)
        elif how == "linked mark":
            (tmp_path / "mark").write_text(KEY)
            (folder / snapshot.MARK_FILE).symlink_to(tmp_path / "mark")
    assert not snapshot.discard_run_folder(KEY)
    assert (folder / "thesis").read_text() == "mine"


def test_what_lies_behind_a_link_is_not_removed(cache: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis").write_text("mine")
    (snapshot.make_run_folder(KEY) / "data").symlink_to(theirs)
    assert snapshot.discard_run_folder(KEY)
    assert (theirs / "thesis").read_text() == "mine"


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "", "a//b", "./x", "a\0b", "x" * 5000])
def test_no_name_leads_out(tmp_path: Path, path: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for work in (lambda: safe_paths.write_file(str(root), path, b"x"),
                 lambda: safe_paths.rename(str(root), "a", path),
                 lambda: safe_paths.open_file(str(root), path, os.O_RDONLY)):  # fmt: skip
        with pytest.raises(ValueError, match="not a path inside"):
            work()
    assert list(tmp_path.iterdir()) == [root]


def test_no_link_is_followed(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    for folder in (root / "deep", other):
        folder.mkdir(parents=True)
    (other / "bashrc").write_text("theirs")
    (root / "file").symlink_to(other / "bashrc")
    (root / "deep" / "folder").symlink_to(other)
    for path in ("file", "deep/folder/bashrc", "deep/folder/new"):
        with pytest.raises(OSError, match="symbolic link"):
            os.close(safe_paths.open_file(str(root), path, os.O_WRONLY | os.O_APPEND | os.O_CREAT))
    safe_paths.write_file(str(root), "file", b"ours")  # in the link's place
    assert (root / "file").read_bytes() == b"ours"
    with pytest.raises(OSError, match="symbolic link"):
        safe_paths.write_file(str(root), "deep/folder/bashrc", b"ours")
    assert (other / "bashrc").read_text() == "theirs"
    assert [path.name for path in other.iterdir()] == ["bashrc"]


def test_a_named_pipe_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    for flags in (os.O_WRONLY | os.O_APPEND, os.O_RDONLY):
        with pytest.raises(OSError):
            safe_paths.open_file(str(tmp_path), "events.jsonl", flags)


# --- the way out


def test_the_outbox_does_not_block() -> None:
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


def test_the_outbox_sends_in_order() -> None:
    read, write = os.pipe()
    wake_read, wake_write = os.pipe()
    try:
        outbox = Outbox(write, wake_write)
        for number in range(10):
            outbox.post({"n": number})
        outbox.flush()
        found = Decoder().feed(os.read(read, 1 << 16))
        assert [message["n"] for message, _ in found] == list(range(10))
    finally:
        for fd in (read, write, wake_read, wake_write):
            os.close(fd)


def test_lone_surrogates_survive() -> None:
    ((message, _),) = frames.Decoder().feed(encode({"arg": os.fsdecode(b"\xff a")}))
    assert os.fsencode(message["arg"]) == b"\xff a"


# --- the fork server's imports


def test_a_module_that_may_be_missing() -> None:
    assert forkserver._preload(["json", "no_such_module?"])["event"] == "imported"
    assert "no_such_module" in forkserver._preload(["no_such_module"])["error"]


# --- what ps shows


def test_a_command_line_is_cut_to_its_room_but_not_its_end() -> None:
    assert process_title.fit_line(b"python a.py", b" [rank 1]", 100) == b"python a.py [rank 1]"
    assert (
        process_title.fit_line(b"python " + b"x" * 99, b" [rank 1]", 30)
        == b"python xxxxxxxxxx ... [rank 1]"
    )
    assert process_title.fit_line(b"a\nb\0c", b"", 30) == b"a b c"
    assert process_title.fit_line(b"a", b" [rank 1]", 5) == b""


def test_a_rank_s_command_line() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "4", "PACELINE_HOST": "n2"}
    entry = {"kind": "module", "target": "pkg.train", "args": ["--lr", "0.1"]}
    assert "".join(process_title.rank_title(entry, env)) == (
        "python -m pkg.train --lr 0.1 [rank 1 of 4, n2]"
    )  # fmt: skip


# --- how busy a host is


def kernel(root: Path) -> Path:
    """Files as a kernel shows them."""
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


def test_how_busy_a_host_is(tmp_path: Path) -> None:
    found = host_load.read_counters(["eth0", "eth1"], kernel(tmp_path))
    assert found["cpu"] == [131, 881]
    assert found["memory"] == [1000 << 10, 250 << 10]
    assert found["links"] == {"eth0": [500, 90]}
    assert found["gpus"] == []
    (tmp_path / "empty").mkdir()
    nothing = host_load.read_counters(["eth0"], tmp_path / "empty")
    assert (nothing["cpu"], nothing["memory"], nothing["links"]) == ([0, 0], [0, 0], {})


class Nvml:
    """Two GPUs, of which the second tells nothing, as NVML's functions say it."""

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


def test_load_of_gpus() -> None:
    load = host_load.nvml(Nvml())
    assert load is not None
    assert load() == [0.87]
    broken = Nvml()
    broken.nvmlInit_v2 = lambda: 18  # type: ignore[method-assign]
    assert host_load.nvml(broken) is None


# --- who else could change what lies in a folder


@pytest.mark.parametrize(
    ("owners", "modes", "alone"),
    [
        ({}, {}, True),
        ({"/": 65534}, {}, True),  # in a container of an ordinary user, where root has no number
        ({"/home": 65534}, {}, False),
        ({"/home/me": 1005}, {}, False),
        ({}, {"/home": 0o777}, False),
        ({}, {"/home": 0o1777}, True),
        ({}, {"/home/me": 0o775}, False),
        ({"/": 65534}, {"/": 0o777}, False),
    ],
)
def test_a_folder_is_ours_alone(owners: dict[str, int], modes: dict[str, int], alone: bool,
                                monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    me = 1001
    usual = {"/": 0, "/home": 0, "/home/me": me}

    def about(path: str) -> os.stat_result:
        return os.stat_result(
            [modes.get(path, 0o755), 0, 0, 0, owners.get(path, usual[path]), 0, 0, 0, 0, 0]
        )

    monkeypatch.setattr(bootstrap.os, "lstat", about)
    monkeypatch.setattr(bootstrap.os, "getuid", lambda: me)
    assert bootstrap.is_trusted_path("/home/me") is alone


@pytest.mark.parametrize(("group", "members", "mode", "other_group", "alone"), [
    ("me", [], 0o775, 8, True), ("me", ["me"], 0o770, 8, True),
    ("me", ["me", "you"], 0o775, 8, False), ("me", [], 0o775, 7, False),
    ("staff", [], 0o775, 8, False), ("me", [], 0o777, 8, False),
])  # fmt: skip
def test_a_folder_that_the_users_own_group_can_write_is_ours_alone(
    group: str, members: list[str], mode: int, other_group: int, alone: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With a umask of 002, as Debian and Red Hat set it, ``~/.cache`` is such a folder."""
    status = os.stat_result([mode, 0, 0, 0, os.getuid(), 7, 0, 0, 0, 0])
    monkeypatch.setattr(bootstrap.os, "lstat", lambda _: status)
    users = [
        SimpleNamespace(pw_name="me", pw_uid=os.getuid(), pw_gid=7),
        SimpleNamespace(pw_name="you", pw_uid=os.getuid() + 1, pw_gid=other_group),
    ]
    monkeypatch.setattr(pwd, "getpwuid", lambda _: users[0])
    monkeypatch.setattr(pwd, "getpwall", lambda: users)
    monkeypatch.setattr(grp, "getgrgid", {7: SimpleNamespace(gr_name=group, gr_mem=members)}.get)
    assert bootstrap.is_trusted_path("/") is alone


def test_what_a_host_has_of_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher on PATH by its real name, a library of LD_LIBRARY_PATH, wrong variables."""
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


def test_relative_folders_of_pythonpath_lie_below_the_work_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python has made them absolute in the folder in which the fork server started."""
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
