"""The page's script, its diff applied, trains; at two ranks as at one."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
import ranks

PAGE = (Path(__file__).parents[2] / "docs/train.md").read_text(encoding="utf-8")


def block(kind: str) -> list[str]:
    (found,) = re.findall(rf"```{kind} file=one.py\n(.*?)```", PAGE, re.DOTALL)
    return found.splitlines()


def applied(script: list[str], diff: list[str]) -> tuple[list[str], int]:
    """The changed script, and how many lines were added."""
    rest, made = list(script), []
    for line in diff[1:]:
        mark, text = line[:1], line[1:]
        if mark != "+":
            assert rest.pop(0) == text
        if mark != "-":
            made.append(text)
    assert not rest
    return made, sum(line.startswith("+") for line in diff)


def test_the_diff_is_what_it_takes(tmp_path: Path) -> None:
    changed, added = applied(block("python"), block("diff"))
    assert added <= 12
    script = tmp_path / "one.py"
    script.write_text("\n".join(changed))
    found = {}
    for size in (1, 2):
        folder = tmp_path / str(size)
        extra = {"PACELINE_RUN_DIR": str(folder / "run")}
        ended = ranks.run_ok(size, [str(script)], folder, extra=extra)
        found[size] = load_file(folder / "run/model/model.safetensors")
        assert "trained 80 steps, 4,995 samples" in ended[0].out
    for name, tensor in found[1].items():
        assert torch.allclose(tensor, found[2][name], atol=1e-5)
