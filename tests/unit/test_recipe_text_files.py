"""Tests which files the text recipe reads, and what it says about others."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from paceline.recipes.data.tables import read_lines
from paceline.recipes.use import text as use_text
from paceline.spec.errors import DataError


def predicted_texts(*names: str) -> list[str]:
    trained_on = {"source": "", "delimiter": "", "columns": ["", ""]}
    return [*use_text._texts(names, trained_on, ["no", "yes"])]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("rev 2.csv.gz", "decompress it: gunzip < 'rev 2.csv.gz' > 'rev 2.csv'"),
        ("lines.log", "a copy named lines.txt"),
        ("good", "a copy named good.txt"),
        ("folder", "name the files in it"),
        ("folder.csv", "name the files in it"),
    ],
)
def test_predict_refuses_names_of_paths_that_it_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, remedy: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.mkdir() if name.startswith("folder") else path.touch()
    with pytest.raises(DataError, match="texts are not read from") as caught:
        predicted_texts(name)
    assert caught.value.remedy.startswith(remedy)
    assert caught.value.remedy.endswith(f'"{name} "')
    assert predicted_texts(f"{name} ") == [f"{name} "]


def test_predict_takes_words_without_a_file_as_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = ["good", "a/b.c", "v1.2.gz", "read me.txt", f"{'long ' * 2000}.csv", "nul \0", ""]
    assert predicted_texts(*texts) == texts


def test_compressed_file_names_command(tmp_path: Path) -> None:
    for name, target in (("d.csv.gz", str(tmp_path / "d.csv")), ("d.csv", "NEW")):
        path = tmp_path / name
        path.write_bytes(gzip.compress(b"label,text\n"))
        with pytest.raises(DataError, match="is compressed") as caught:
            read_lines(path)
        assert caught.value.remedy == f"decompress it: gunzip < {path} > {target}"
