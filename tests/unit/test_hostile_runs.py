"""Tests that hostile run directories and logs give a clear answer soon, and have no effect."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import hostile_files
from paceline.explain.evidence import MAX_LINE_CHARS, MAX_LINES, lines_of
from paceline.explain.evidence_reader import from_run, read_named
from paceline.progress import describe
from paceline.rundir.records import open_regular, read_object, read_records
from paceline.spec import rundir as names
from paceline.spec import schema

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_verbs_survive_hostile_run_directories(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 10):
        path = hostile_files.run_folder(seed, tmp_path)
        for argv in hostile_files.verbs(path, seed):
            start = time.process_time()  # of a CPU, which others may want, too
            output, problem = hostile_files.call(*argv)
            assert not problem, (seed, argv, problem)
            assert not hostile_files.obeyed(output), (seed, argv)
            assert time.process_time() - start < 20, (seed, argv)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(__file__)
    for name in ("pipe", "link", ".", "none"):
        with pytest.raises(OSError):
            open_regular(tmp_path / name)


def test_explain_does_not_write_through_symlink(tmp_path: Path) -> None:
    run, target = tmp_path / "run", tmp_path / "bashrc"
    run.mkdir()
    target.write_text("mine")
    (run / names.RESULT).write_text('{"exit_code": 1}')
    (run / names.FINDINGS).symlink_to(target)
    hostile_files.call("explain", str(run))
    assert target.read_text() == "mine"


def test_logs_behind_symlinks_are_not_read(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "logs" / "n1").mkdir(parents=True)
    (run / names.RESULT).write_text('{"exit_code": 1}')
    (tmp_path / "0.log").write_text("secret\n")
    (run / "logs" / "n1" / "0.log").symlink_to(tmp_path / "0.log")
    (run / "logs" / "n2").symlink_to(tmp_path)
    assert from_run(run).logs == ()
    assert "secret" not in hostile_files.call("logs", str(run))[0]


def test_huge_files_are_read_partially(tmp_path: Path) -> None:
    for name in ("a.json", "a.jsonl"):
        hostile_files.huge(tmp_path / name)
    assert read_object(tmp_path / "a.json") is None
    assert read_records(tmp_path / "a.jsonl") == []
    file = tmp_path / "many.jsonl"
    file.write_text("".join(f'{{"step": {n}}}\n' for n in range(100_000)))
    rows = read_records(file, size=1000)
    assert (rows[0], rows[-1]) == ({"step": 0}, {"step": 99_999})
    assert len(rows) < 300


def test_log_lines_are_limited_in_length_and_number() -> None:
    (line,) = lines_of("a" * 50_000_000 + "ValueError: the end")
    assert len(line) < MAX_LINE_CHARS + 20
    assert line.endswith("ValueError: the end")
    assert len(lines_of("x\n" * 3 * MAX_LINES)) == MAX_LINES


def test_reads_log_from_pipe_and_endless_device(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"one\ntwo\n")
    os.close(write)
    assert read_named(Path(f"/dev/fd/{read}")) == "one\ntwo\n"
    os.close(read)
    assert len(read_named(Path("/dev/zero"))) < 5 << 20


def test_integers_beyond_floats_are_no_numbers(tmp_path: Path) -> None:
    huge = "1" + "0" * 400
    (tmp_path / names.RESULT).write_text(f'{{"exit_code": 0, "seconds": {huge}}}')
    (tmp_path / names.EVENTS).write_text(
        f'{{"time": {huge}, "event": "connected", "hosts": ["n1"]}}\n'
        f'{{"time": 1, "event": "checkpoint", "step": 1, "seconds": {huge}}}\n'
    )
    (tmp_path / names.METRICS).write_text(
        f'{{"step": 1, "split": "train", "loss": {huge}, "samples_per_s": {huge}}}\n'
    )
    for verb in ("status", "explain", "report", "logs"):
        assert hostile_files.call(verb, str(tmp_path))[1] == ""
    assert describe({"step": 1, "loss": int(huge), "samples_per_s": int(huge)}) == "step 1"
    assert not schema.matches(schema.number, int(huge))
    assert not schema.matches(schema.number, float("nan"))
