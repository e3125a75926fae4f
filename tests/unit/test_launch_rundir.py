"""Tests the run directory: one owner, complete files, no secrets."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from paceline.agent.files import snapshot
from paceline.agent.supervision import processes
from paceline.cli import program
from paceline.launch.results.run_outcome import log_tail
from paceline.rundir import directory as rundir
from paceline.rundir.directory import CHECKED_BYTES, RunDirectory
from paceline.rundir.ownership import FETCHED_AT
from paceline.spec.detached import SupervisorLocation
from paceline.spec.errors import NodeError, SettingError
from paceline.spec.rundir import log_file, safe_name
from paceline.transfer.results import room_problem


def write_owner(path: Path, **fields: Any) -> None:
    path.mkdir(parents=True, exist_ok=True)
    process = processes.identify(os.getpid())
    assert process is not None
    base = {
        "host": socket.gethostname(),
        "pid": process.pid,
        "start": process.start,
        "since": "now",
    }
    (path / "owner.json").write_text(json.dumps({**base, **fields}))


def test_run_directory_has_single_owner(tmp_path: Path) -> None:
    first = RunDirectory(tmp_path / "run")
    with pytest.raises(SettingError) as caught:
        RunDirectory(tmp_path / "run")
    assert str(os.getpid()) in caught.value.found
    first.close()
    RunDirectory(tmp_path / "run").close()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".paceline-brought"]


def test_open_directory_is_in_use_despite_unknown_pid(tmp_path: Path) -> None:
    """The owner may run in another container of this host."""
    first = RunDirectory(tmp_path / "run")
    write_owner(tmp_path / "run", pid=2**22 + 1)
    with pytest.raises(SettingError, match="in use"):
        RunDirectory(tmp_path / "run")
    first.close()
    write_owner(tmp_path / "run", pid=2**22 + 1)
    RunDirectory(tmp_path / "run").close()


@pytest.mark.parametrize("name", ["config.json", "result.json", "model", "plan.json"])
def test_rejects_folder_with_foreign_files(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(SettingError, match="holds files of something else") as caught:
        RunDirectory(tmp_path)
    assert name in caught.value.found
    assert [path.name for path in tmp_path.iterdir()] == [name]
    (tmp_path / "events.jsonl").touch()  # a file of a run
    RunDirectory(tmp_path).close()


def test_rejected_folder_is_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the report of the error is written there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.html").write_text("mine")
    (tmp_path / "train.py").touch()
    result = CliRunner().invoke(
        program, ["run", "-H", "local", "--no-torch", "--run-dir", ".", "train.py"]
    )
    assert isinstance(result.exception, SettingError)
    assert "holds files of something else" in result.exception.message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "train.py"]
    assert (tmp_path / "report.html").read_text() == "mine"


def test_accepts_project_folder(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "config.json").touch()  # a project's file is never replaced
    RunDirectory(tmp_path).close()


def test_replaces_dead_owner(tmp_path: Path) -> None:
    write_owner(tmp_path, start=1)  # the process ID is in use by another process
    RunDirectory(tmp_path).close()
    write_owner(tmp_path, pid=2**22 + 1)
    RunDirectory(tmp_path).close()


def test_rejects_folder_owned_on_different_machine(tmp_path: Path) -> None:
    """The remedy removes the owner file only if the owner is on another machine."""
    write_owner(tmp_path, host="elsewhere")
    with pytest.raises(SettingError, match="in use") as caught:
        RunDirectory(tmp_path)
    remedy = f"; if elsewhere is gone for good: rm {tmp_path}/owner.json"
    assert caught.value.remedy.endswith(remedy)
    write_owner(tmp_path)
    with pytest.raises(SettingError, match="in use") as caught:
        RunDirectory(tmp_path)
    assert "rm " not in caught.value.remedy


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "\x00"])
def test_ignores_damaged_owner_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "owner.json").write_text(text)
    RunDirectory(tmp_path).close()


def test_limits_open_log_files(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    names = [log_file("n1", rank) for rank in range(3 * rundir.MAX_OPEN_FILES)]
    before = len(list(Path("/proc/self/fd").iterdir()))
    for word in (b"first\n", b"second\n"):
        for name in names:
            directory.append_bytes(name, word)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + rundir.MAX_OPEN_FILES
    directory.close()
    assert all((tmp_path / name).read_bytes() == b"first\nsecond\n" for name in names)


def test_writes_files_and_appends_lines(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.write_json("plan.json", {"a": "ü\udcff"})
    directory.event("started", "n1", 0, word="x")
    directory.event("ended")
    directory.append_bytes("logs/n1/0.log", b"a")
    directory.append_bytes("logs/n1/0.log", b"b")
    directory.close()
    assert json.loads((tmp_path / "plan.json").read_text()) == {"a": "ü\udcff"}
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["started", "ended"]
    assert (lines[0]["host"], lines[0]["rank"], lines[0]["word"]) == ("n1", 0, "x")
    assert (tmp_path / "logs/n1/0.log").read_bytes() == b"ab"


def test_redacts_secrets_in_appended_data(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, ["s3cret", os.fsdecode(b"\xff\xfe-bytes")])
    directory.append_bytes("log", b"it is s3cret and \xff\xfe-bytes.\n")
    directory.append_line("events.jsonl", {"word": "s3cret"})
    directory.close()
    assert (tmp_path / "log").read_bytes() == b"it is [secret] and [secret].\n"
    assert "s3cret" not in (tmp_path / "events.jsonl").read_text()


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_redacts_secret_split_across_writes(tmp_path: Path, size: int) -> None:
    """Two streams are written to the log in pieces of any size."""
    directory = RunDirectory(tmp_path, ["s3cret", "s3cret-and-longer"])
    text = b"it is s3cret, s3crs3cret-and-longer. s3cre"
    for at in range(0, len(text), size):
        directory.append_bytes("log", text[at : at + size], "out")
        directory.append_bytes("log", b"!", "err")
    directory.close()
    redacted_log = (tmp_path / "log").read_bytes().replace(b"!", b"")
    # the shorter secret may be replaced first; the rest of the longer one is harmless
    assert redacted_log in (
        b"it is [secret], s3cr[secret]. s3cre",
        b"it is [secret], s3cr[secret]-and-longer. s3cre",
    )


def test_finish_flushes_partial_secret(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, ["s3cret"])
    directory.append_bytes("log", b"a s3")
    assert (tmp_path / "log").read_bytes() == b"a "
    directory.finish("log")
    assert (tmp_path / "log").read_bytes() == b"a s3"
    directory.close()


def test_redacts_secrets_in_json_files(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, ['s3"cret\\'])
    directory.write_json("result.json", {"traceback": 'ValueError: s3"cret\\ is wrong'})
    directory.close()
    text = json.loads((tmp_path / "result.json").read_text())
    assert text["traceback"] == "ValueError: [secret] is wrong"


def test_full_disk_error(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory._files["log"] = open("/dev/full", "ab", buffering=0)  # noqa: PTH123, SIM115
    with pytest.raises(NodeError) as caught:
        directory.append_bytes("log", b"x")
    assert "No space left" in caught.value.found
    assert "--run-dir" in caught.value.remedy
    directory.close()


@pytest.mark.parametrize(
    ("total", "free", "reserve"),
    [
        (1 << 40, 500 << 30, 1 << 30),
        (4 << 30, 3 << 30, (4 << 30) // 10),
        (100 << 20, 90 << 20, 10 << 20),
        (1 << 40, 800 << 20, 400 << 20),  # a disk that is nearly full at the start
        (1 << 40, 20 << 20, 16 << 20),
    ],
)
def test_output_leaves_room_for_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, free: int, reserve: int
) -> None:
    directory = RunDirectory(tmp_path)
    disk = types.SimpleNamespace(total=total, free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    assert directory.append_output("log", b"x" * CHECKED_BYTES)
    for disk.free, has_room in ((reserve + CHECKED_BYTES, True), (reserve, False)):
        assert directory.append_output("log", b"x" * CHECKED_BYTES) == has_room
    assert (free < 64 << 20) == bool(room_problem(tmp_path, reserve // 2))
    directory.close()


def test_output_keeps_disk_space_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(tmp_path)
    free = 20 << 20

    def usage(path: Path) -> Any:
        return types.SimpleNamespace(total=1 << 40, free=free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert directory.append_output("log", b"kept ")
    free = 10 << 20
    assert directory.append_output("log", b"a little more is not checked ")
    assert not directory.append_output("log", bytes(CHECKED_BYTES))
    assert not directory.append_output("log", b"dropped")
    free = 20 << 20
    assert directory.append_output("log", b"again")
    directory.close()
    assert (tmp_path / "log").read_bytes() == b"kept a little more is not checked again"


def test_run_directory_is_private(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "runs" / "run")
    directory.append_bytes("logs/n1/0.log", b"x")
    for folder in ("", "logs", "logs/n1"):
        assert (directory.path / folder).stat().st_mode & 0o777 == 0o700
    directory.close()


@pytest.mark.parametrize("name", ["logs", "logs/n1", "logs/n1/0.log", "events.jsonl", "plan.json"])
def test_does_not_follow_links_in_run_directory(tmp_path: Path, name: str) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    directory = RunDirectory(run)
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    other.mkdir()
    (other / "0.log").write_text("theirs")
    (run / name).symlink_to(other / "0.log" if "." in name else other)
    if name == "plan.json":
        directory.write_json(name, {})  # replaces the link
    else:
        with pytest.raises(NodeError, match="cannot write") as caught:
            directory.append_bytes("logs/n1/0.log" if "logs" in name else name, b"ours")
        assert "symbolic link" in caught.value.found
        assert "ls -l" in caught.value.remedy
    directory.close()
    assert [path.name for path in other.iterdir()] == ["0.log"]
    assert (other / "0.log").read_text() == "theirs"


# --- the key


def test_key_is_created_once(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    key = directory.key
    assert snapshot.is_key(key)
    directory.close()
    reopened = RunDirectory(tmp_path)
    assert reopened.key == key
    reopened.close()


def test_replaces_empty_key(tmp_path: Path) -> None:
    (tmp_path / ".paceline-key").write_text("\n")
    directory = RunDirectory(tmp_path)
    assert snapshot.is_key(directory.key)
    directory.close()


@pytest.mark.parametrize("text", ["../../../Documents", "/home/u/thesis", ".", "0" * 23, "0" * 25,
                                  "\x00" * 24, "0" * 5000])  # fmt: skip
def test_rejects_malformed_key(tmp_path: Path, text: str) -> None:
    (tmp_path / ".paceline-key").write_text(text)
    with pytest.raises(SettingError, match="no key of a run") as caught:
        RunDirectory(tmp_path)
    assert f"rm {tmp_path}/.paceline-key" in caught.value.remedy
    assert len(caught.value.found) < 300


def test_rejects_linked_key(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("0" * 24)
    (tmp_path / ".paceline-key").symlink_to(tmp_path / "other")
    with pytest.raises(SettingError, match="links under names that a run uses") as caught:
        RunDirectory(tmp_path)
    assert ".paceline-key -> " in caught.value.found


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl", "model", "returned", "Logs"])
def test_rejects_links_under_reserved_names(tmp_path: Path, name: str) -> None:
    """Links would determine which files are read, sent to hosts and removed."""
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.mkdir()
    (run / "events.jsonl").touch()  # from an earlier run
    (run / "data").symlink_to(other)  # a link of the user: no run uses this name
    RunDirectory(run).close()
    (run / name).symlink_to(other)
    with pytest.raises(SettingError, match="links under names that a run uses"):
        RunDirectory(run)
    assert (run / name).is_symlink()


def test_rejects_folder_of_unfinished_detached_run(tmp_path: Path) -> None:
    """The results of the detached run would later replace those of a second run."""
    location = SupervisorLocation("ab" * 6, "n2", "n2", "/x", 1000.0).to_json()
    (tmp_path / "detached.json").write_text(json.dumps(location))
    with pytest.raises(SettingError, match="detached run that is not over") as caught:
        RunDirectory(tmp_path)
    assert f"paceline attach {tmp_path}" in caught.value.remedy
    assert (tmp_path / "detached.json").exists()
    (tmp_path / "detached.json").write_text(json.dumps({**location, FETCHED_AT: 2000.0}))
    RunDirectory(tmp_path).close()


def test_run_directory_may_be_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    RunDirectory(tmp_path / "run").close()


def test_full_disk_creates_no_empty_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(tmp_path)

    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(NodeError, match="cannot write"):
            _ = directory.key
    assert not (tmp_path / ".paceline-key").exists()
    assert snapshot.is_key(directory.key)
    directory.close()


def test_is_launcher_file() -> None:
    launcher_files = ["plan.json", "events.jsonl", "logs/n1/0.log", ".paceline-key", "files/n2/x",
            ".paceline-incoming/x", "owner.json", "result.json", "checkpoints/10/weights",
            "metrics-before-20200101-000000.jsonl"]  # fmt: skip
    assert all(map(rundir.names.is_launcher_file, launcher_files))
    lookalikes = [
        "PLAN.JSON",
        "Logs/n1/0.log",
        "re\u017fult.json",
        "\u200cplan.json",
        ".Paceline-Key",
    ]
    assert all(map(rundir.names.is_launcher_file, lookalikes))  # the same names on macOS
    assert not any(
        map(rundir.names.is_launcher_file, ["model/model.safetensors", "config.json", "x.log"])
    )


def test_path_that_cannot_be_created() -> None:
    with pytest.raises(NodeError, match="/proc/none"):
        RunDirectory(Path("/proc/none/run"))


@pytest.mark.parametrize(
    ("name", "folder"),
    [("n1", "n1"), ("a/b", "a_b"), ("..", "_"), ("fe80::1%eth0", "fe80__1_eth0"), ("ü", "_"),
     (".x", "x"), ("", "_")],
)  # fmt: skip
def test_safe_name(name: str, folder: str) -> None:
    assert safe_name(name) == folder


def test_fresh_path_is_unique(tmp_path: Path) -> None:
    one = rundir.fresh_path(tmp_path, "my job")
    one.mkdir()
    two = rundir.fresh_path(tmp_path, "my job")
    assert one.name.startswith("my_job-")
    assert one != two


def test_claimed_paths_are_unique_and_removed_if_empty(tmp_path: Path) -> None:
    """The folder is created immediately, and removed if nothing is written into it."""
    parent = tmp_path / "runs"
    with rundir.claimed(parent, "job") as one:
        with rundir.claimed(parent, "job") as two, rundir.claimed(parent, "job") as three:
            (two / "plan.json").touch()
            assert len({one, two, three}) == 3
        assert {*parent.iterdir()} == {one, two}
    with rundir.claimed(tmp_path / "none", "job") as empty:
        assert empty.is_dir()
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").touch()
    with rundir.claimed(tmp_path / "file", "job") as only_a_name:
        assert not only_a_name.exists()


def test_log_tail_excludes_previous_run(tmp_path: Path) -> None:
    """Lines that an earlier run left in the same log do not belong to this run's failure."""
    name = log_file("n1", 0)
    for text in (b"of the first run\n", b"of the second run\n"):
        directory = RunDirectory(tmp_path)
        offset = directory.size(name)
        directory.append_bytes(name, text)
        directory.close()
    assert log_tail(tmp_path / name, offset) == "of the second run"
    with (tmp_path / name).open("a") as log:
        log.write("[W] [c10d] The hostname of the client socket cannot be retrieved\n")
    assert log_tail(tmp_path / name, offset) == "of the second run"


def test_event_returns_redacted_record(tmp_path: Path) -> None:
    """Callers print or keep the returned record, so it must not contain secrets either."""
    directory = RunDirectory(tmp_path / "run", ["hunter2-hunter2"])
    line = directory.event("hang", "n1", 0, text='in "hunter2-hunter2", line 3')
    assert line["text"] == 'in "[secret]", line 3'
    assert directory.redacted("hunter2-hunter2 ü \ud800") == "[secret] ü \ud800"
    directory.close()
    assert json.loads((tmp_path / "run" / "events.jsonl").read_text()) == line


@pytest.mark.parametrize("name", ["a\tb", "a\nb", "a\u2028b"])
def test_rejects_control_characters_in_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingError, match="control characters"):
        rundir.require_usable(tmp_path / name / "runs/1")
    rundir.require_usable(tmp_path / "ü o'\u202e😀/runs/1")
