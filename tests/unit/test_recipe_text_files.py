"""Tests which files the text recipe reads, and what it says about others."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from paceline.recipes.data.pairs import load_pairs
from paceline.recipes.data.tables import read_lines
from paceline.recipes.data.texts import Recorded, load_texts
from paceline.recipes.options import TextOptions, TranslationOptions
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


def write_parts(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_text("".join(f"{('no', 'yes')[n % 2]},text {n}\n" for n in range(8)))


def test_names_of_parts_may_have_capitals(tmp_path: Path) -> None:
    write_parts(tmp_path, "Train.CSV", "TEST.csv")
    data = load_texts(TextOptions(data=str(tmp_path)))
    assert {name: len(texts) for name, (texts, _) in data.splits.items()} == {"train": 8, "test": 8}
    (tmp_path / "pairs").mkdir()
    for name in ("Train.TSV", "Val.de", "Val.EN"):
        (tmp_path / "pairs" / name).write_text("a\tb\nc\td\n")
    options = TranslationOptions(
        data=str(tmp_path / "pairs"), source_lang="de", target_lang="en", model="tiny"
    )
    assert {name: len(pairs) for name, pairs in load_pairs(options).splits.items()} == {
        "train": 2,
        "val": 2,
    }


def test_file_in_lower_case_is_preferred(tmp_path: Path) -> None:
    write_parts(tmp_path, "train.csv", "test.csv")
    (tmp_path / "Train.csv").write_text("other,one\nother,two\n")
    assert load_texts(TextOptions(data=str(tmp_path))).classes == ("no", "yes")


def test_compressed_part_of_folder_is_named(tmp_path: Path) -> None:
    write_parts(tmp_path, "train.csv", "test.csv.gz")
    with pytest.raises(DataError, match=r"test\.csv\.gz is compressed") as caught:
        load_texts(TextOptions(data=str(tmp_path)))
    assert "gunzip < " in caught.value.remedy
    write_parts(tmp_path, "test.csv")  # beside the original
    assert load_texts(TextOptions(data=str(tmp_path))).splits.keys() == {"train", "test"}


def test_row_with_null_is_left_out_like_empty_cell(tmp_path: Path) -> None:
    rows = [{"label": ("no", "yes")[n % 2], "text": f"text {n}"} for n in range(8)]
    path = tmp_path / "d.jsonl"
    incomplete = [{"label": None, "text": "a"}, {"label": "no", "text": None}]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in (*rows, *incomplete)))
    data = load_texts(TextOptions(data=str(path)))
    assert (data.skipped, data.classes) == (2, ("no", "yes"))
    path.write_text("".join(f"{json.dumps(row)}\n" for row in (*rows, {"text": "a"})))
    with pytest.raises(DataError, match=r"d\.jsonl row 9 lacks label\n") as caught:
        load_texts(TextOptions(data=str(path)))
    assert caught.value.remedy == "complete or remove the row"


def test_unknown_label_error_names_its_file(tmp_path: Path) -> None:
    write_parts(tmp_path, "train.csv")
    other = tmp_path / "other.csv"
    other.write_text("no,a\nperhaps,b\nperhaps,c\n")
    with pytest.raises(DataError, match=f"{other}: label 'perhaps' is not among"):
        load_texts(TextOptions(data=str(tmp_path / "train.csv"), test_data=str(other)))
    with pytest.raises(DataError, match=f"{other}: label 'perhaps' is not among"):
        load_texts(TextOptions(data=str(other)), ("no", "yes"), Recorded(("", "")))
