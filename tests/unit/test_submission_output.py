"""Tests that the output of a batch job, written by nodes, cannot control the user's terminal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.schedulers.submission import FileTail


def test_batch_output_is_sanitized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "slurm-1.out"
    tail = FileTail(path)
    tail.show()  # the file does not exist yet
    path.write_bytes(b"one\n\x1b]52;c;ZXZpbA==\x07two\n\x1b]0;tit")
    tail.show()
    with path.open("ab") as file:
        file.write(b"le\x07three\nfour")
    tail.show()
    assert capsys.readouterr().out == "one\ntwo\nthree\n"
    tail.close()
    assert capsys.readouterr().out == "four"


def test_does_not_block_on_pipe_in_place_of_output(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "slurm-1.out")
    tail = FileTail(tmp_path / "slurm-1.out")
    tail.show()
    tail.close()
