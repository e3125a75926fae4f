"""Tests each recipe's minimal copy: trains, resumes, evaluates; same results on one and two ranks.

``python tests/train/test_minimal_recipes.py`` records the losses again. If they change, the copies
train differently than before.
"""

from __future__ import annotations

import ast
import json
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.cli.verbs.recipe import script
from paceline.recipes.data.pairs import numbers
from paceline.recipes.data.texts import meals
from paceline.recipes.minimal import text as minimal_text

sys.path.insert(0, str(Path(__file__).parent))
import local_ranks

GOLDEN = Path(__file__).parents[1] / "golden/minimal"
NAMES = ("image", "text", "translation", "language")


def flags(name: str, folder: Path) -> list[str]:
    """Returns flags for two short epochs."""
    if name == "image":
        return ["--epochs=2"]
    file = folder / "rows"
    rows = (f"{label},{text}" for label, text in meals(0)[:320])
    pairs = ("\t".join(pair) for pair in numbers(0)[:640])
    file.write_text("\n".join(pairs if name == "translation" else rows))
    return ["--epochs=2", f"--data={file}"]


def train(name: str, size: int, folder: Path, run: Path) -> list[local_ranks.Ended]:
    """Runs the copy in float64, with every step recorded."""
    text = script(name)
    exact = text.replace('dtype="float32"', 'dtype="float64", log_every=1')
    assert exact != text
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(exact)
    args = [str(folder / "mine.py"), *flags(name, folder)]
    return local_ranks.run_ok(size, args, folder, extra={"PACELINE_RUN_DIR": str(run)})


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    by_step = {one["step"]: one["loss"] for one in lines if one["split"] == "train"}
    return [by_step[step] for step in sorted(by_step)]


def parameters(run: Path) -> torch.Tensor:
    state = load_file(run / "model/model.safetensors")
    return torch.cat([state[name].flatten() for name in sorted(state)])


@pytest.mark.parametrize("name", NAMES)
def test_matches_golden_losses_and_resumes_at_any_world_size(name: str, tmp_path: Path) -> None:
    expected = json.loads((GOLDEN / f"{name}.json").read_text())["losses"]
    one, two, resumed = (tmp_path / folder / "run" for folder in ("one", "two", "resumed"))
    train(name, 1, one.parent, one)
    assert losses(one) == pytest.approx(expected, rel=1e-8)
    train(name, 2, two.parent, two)
    assert losses(two) == pytest.approx(expected, rel=1e-8)
    assert (parameters(one) - parameters(two)).abs().max() < 1e-10

    shutil.copytree(two, resumed)
    shutil.rmtree(resumed / f"checkpoints/{len(expected)}")
    shutil.rmtree(resumed / "model")
    ended = train(name, 1, resumed.parent, resumed)
    assert f"resumed after step {len(expected) // 2}" in ended[0].out + ended[0].err
    assert (parameters(one) - parameters(resumed)).abs().max() < 1e-10

    args = [str(one.parent / "mine.py"), *flags(name, one.parent), f"--evaluate={one}"]
    (evaluated,) = local_ranks.run_ok(1, args, tmp_path / "evaluated")
    last = json.loads((one / "metrics.jsonl").read_text().splitlines()[-1])
    figures = ast.literal_eval(evaluated.out.strip())
    assert {key: last[key] for key in figures} == figures


@pytest.mark.parametrize(
    "header", ["", "\n", "Label,Text\n", "label, text\n", "text,id,sentiment\n"]
)
def test_text_script_reads_table_with_and_without_header(header: str, tmp_path: Path) -> None:
    row = "a b,1,yes\n" if "id" in header else "yes,a b\n"
    (tmp_path / "d.csv").write_text(header + 3 * row, encoding="utf-8-sig")
    samples, words, labels = minimal_text.read(str(tmp_path / "d.csv"))
    assert (len(samples), words[2:], labels) == (3, ["a", "b"], ["yes"])


@pytest.mark.parametrize("name", NAMES)
def test_script_is_short_and_needs_only_torch(name: str) -> None:
    text = script(name)
    assert len(text.splitlines()) <= {"image": 120}.get(name, 150)
    modules = [
        module
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for module in (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    ]
    paceline_modules = [module for module in modules if module.startswith("paceline")]
    assert len(paceline_modules) == (1 if name == "image" else 2)
    third_party = {module.partition(".")[0] for module in modules} - {"torch", "paceline"}
    assert third_party <= sys.stdlib_module_names


if __name__ == "__main__":
    for recipe_name in sys.argv[1:] or NAMES:
        with tempfile.TemporaryDirectory() as temporary:
            run = Path(temporary) / "run"
            train(recipe_name, 1, Path(temporary) / "made", run)
            golden = {"losses": losses(run)}
        GOLDEN.mkdir(exist_ok=True)
        (GOLDEN / f"{recipe_name}.json").write_text(json.dumps(golden, indent=1) + "\n")
