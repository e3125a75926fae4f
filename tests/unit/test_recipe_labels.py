"""Tests labels of texts: similar words and numbers, and lines about classes."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.recipes import text
from paceline.recipes.data.classes import describe_classes, similar_labels
from paceline.recipes.data.texts import TextData, load_texts
from paceline.recipes.options import TextOptions


def read_labels(path: Path, labels: Sequence[str]) -> TextData:
    """Writes a row for each label, and reads them."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows((label, f"text {n}") for n, label in enumerate(labels))
    return load_texts(TextOptions(data=str(path)))


def test_first_row_with_a_float_label_is_no_header(tmp_path: Path) -> None:
    assert len(read_labels(tmp_path / "d.csv", ["1.0", "2.0"] * 5).labels) == 2


def test_similar_labels_are_named(tmp_path: Path) -> None:
    assert similar_labels(
        ["Spam", "ham", "spam", "no  spam", "no spam", "1", "2", "1.0", "01", "v1"]
    ) == [["Spam", "spam"], ["no  spam", "no spam"], ["1", "1.0", "01"]]
    data = read_labels(tmp_path / "d.csv", ["Spam", "ham", "spam"] * 5)
    assert "warning: classes that differ only in spelling: 'Spam', 'spam'" in [*data.remarks()]


def test_describe_classes_counts_and_shortens() -> None:
    assert describe_classes("image", ("cat", "dog", "owl"), [1] * 1_200 + [0] * 9) == (
        "1,209 images of 3 classes: dog 1,200, cat 9, owl 0"
    )
    names = tuple("abcdefgh")
    numbers = [number for number in range(8) for _ in range(10 - number)]
    assert describe_classes("text", names, numbers) == (
        "52 texts of 8 classes: a 10, b 9, c 8, d 7, e 6, …, h 3"
    )
    many = describe_classes("row", [f"a\nb{'c' * 99}{n}" for n in range(500)], range(500))
    assert "500 classes: a b" in many
    assert len(many) < 500
    assert "\n" not in many


def test_training_starts_with_its_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = read_labels(tmp_path / "d.csv", ["yes", "no", "no"] * 5)
    flags = ["--device=cpu", "--checkpoint-every=never", "--steps=1", f"--data={data.source}"]
    assert text.main([f"--run-dir={tmp_path / 'run'}", *flags]) == 0
    assert f"{data.source}: 15 rows of 2 classes: no 10, yes 5\n" in capsys.readouterr().out
