"""Tests on which rows ``paceline evaluate --data`` evaluates, in every recipe that draws parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_language_model
from PIL import Image
from recipe_tools import hub_variables, one_thread  # noqa: F401 - fixtures

from paceline.recipes import image, text, translation
from paceline.recipes.data.images import InMemory, Joined
from paceline.recipes.language import sft
from paceline.recipes.use import evaluate

Main = Callable[[list[str]], int]


def texts(path: Path, start: int) -> Path:
    rows = (f"{('no', 'yes')[n % 2]},text {n}" for n in range(start, start + 20))
    path.with_suffix(".csv").write_text("\n".join(rows))
    return path.with_suffix(".csv")


def pairs(path: Path, start: int) -> Path:
    path.with_suffix(".tsv").write_text(
        "\n".join(f"a {n}\tb {n}" for n in range(start, start + 20))
    )
    return path.with_suffix(".tsv")


def conversations(path: Path, start: int) -> Path:
    rows = tiny_language_model.chats(40)[start : start + 20]
    tiny_language_model.write_jsonl(path.with_suffix(".jsonl"), rows)
    return path.with_suffix(".jsonl")


def images(path: Path, start: int) -> Path:
    for n in range(start, start + 20):
        file = path / ("a", "b")[n % 2] / f"{n}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (n, n, n)).save(file)
    return path


@pytest.mark.parametrize(
    ("main", "write", "flags", "drawn"),
    [
        (text.main, texts, ["--checkpoint-every=never"], ("test", 2)),
        (image.main, images, ["--image-size=8"], ("test", 4)),
        (translation.main, pairs, ["--model=tiny", "--samples=0"], ("val", 2)),
        (sft.main, conversations, ["--samples=0", "--lora-rank=2"], ("val", 2)),
    ],
)
def test_evaluates_all_of_other_data(
    main: Main,
    write: Callable[[Path, int], Path],
    flags: list[str],
    drawn: tuple[str, int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data, other = write(tmp_path / "data", 0), write(tmp_path / "other", 20)
    run, report = tmp_path / "run", tmp_path / "report.json"
    if main is sft.main:
        flags = [*flags, f"--model={tiny_language_model.save(tmp_path / 'base')}"]
    assert main([f"--run-dir={run}", f"--data={data}", "--steps=1", "--device=cpu", *flags]) == 0
    capsys.readouterr()

    def evaluated(*flags: str) -> tuple[str, int]:
        assert evaluate.main([f"--run={run}", f"--figures={report}", *flags]) == 0
        content = json.loads(report.read_text())
        return content["split"], content["samples"]

    assert evaluated(f"--data={other}") == ("test", 20)
    assert f"{other} is not divided: all of it is evaluated" in capsys.readouterr().out
    assert evaluated(f"--data={other}", f"--split={drawn[0]}") == drawn
    assert evaluated(f"--data={data}") == evaluated() == drawn
    said = f"{data} is what the model was trained on: its {drawn[0]} part is evaluated"
    assert said in capsys.readouterr().out


def test_joined_images_keep_their_order() -> None:
    pixels = np.arange(10, dtype=np.uint8).reshape(10, 1, 1, 1)
    labels = np.arange(10)
    joined = Joined([InMemory(pixels[:3], labels[:3]), InMemory(pixels[3:], labels[3:])])
    ids = np.array([9, 0, 3, 2, 9])
    assert joined.labels.tolist() == labels.tolist()
    assert joined.pixels(ids).ravel().tolist() == ids.tolist()
