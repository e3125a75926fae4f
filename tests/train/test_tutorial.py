"""Tests that the tutorial's script, with its diff applied, trains the same on one and two ranks."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
import local_ranks

DOCS = Path(__file__).parents[2] / "docs"


def block(kind: str, file: str = "one", page: str = "tutorial/training-session") -> list[str]:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    (found,) = re.findall(rf"```{kind} file={file}.py\n(.*?)```", text, re.DOTALL)
    return found.splitlines()


def applied(script: list[str], diff: list[str]) -> tuple[list[str], int]:
    """Returns the changed script and the number of added lines."""
    remaining, output_lines = list(script), []
    for line in diff[1:]:
        mark, text = line[:1], line[1:]
        if mark != "+":
            assert remaining.pop(0) == text
        if mark != "-":
            output_lines.append(text)
    assert not remaining
    return output_lines, sum(line.startswith("+") for line in diff)


def test_diff_of_page_trains(tmp_path: Path) -> None:
    changed, added = applied(block("python"), block("diff"))
    assert added <= 12
    script = tmp_path / "one.py"
    script.write_text("\n".join(changed))
    found = {}
    for size in (1, 2):
        folder = tmp_path / str(size)
        extra = {"PACELINE_RUN_DIR": str(folder / "run")}
        ended = local_ranks.run_ok(size, [str(script)], folder, extra=extra)
        found[size] = load_file(folder / "run/model/model.safetensors")
        assert "trained 80 steps, 4,995 samples" in ended[0].out
    for name, tensor in found[1].items():
        assert torch.allclose(tensor, found[2][name], atol=1e-5)


def test_diff_with_evaluation_and_schedule_trains(tmp_path: Path) -> None:
    changed, added = applied(block("python", "two"), block("diff", "two"))
    assert added <= 18
    script = tmp_path / "two.py"
    script.write_text("\n".join(changed))
    lines = {}
    for size in (1, 2):
        folder = tmp_path / str(size)
        extra = {"PACELINE_RUN_DIR": str(folder / "run")}
        ended = local_ranks.run_ok(size, [str(script)], folder, extra=extra)
        shown = re.findall(
            r"epoch (\d)  step \d+/128  train: .*held out: accuracy (\S+)", ended[0].out
        )
        assert [int(epoch) for epoch, _ in shown] == [*range(1, 9)]
        lines[size] = [float(accuracy) for _, accuracy in shown]
        best = json.loads((folder / "run/checkpoints/best.json").read_text())["step"]
        assert lines[size][best // 16 - 1] == max(lines[size])
        weights = load_file(folder / f"run/checkpoints/{best}/weights.safetensors")
        assert sorted(weights) == ["0.bias", "0.weight", "2.bias", "2.weight"]
        state = json.loads((folder / f"run/checkpoints/{128}/state.json").read_text())
        assert state["extras"]["schedule"]["last_epoch"] == 8
    assert max(abs(one - two) for one, two in zip(lines[1], lines[2], strict=True)) < 0.02
    assert max(lines[1]) > 0.85


def test_single_rank_reports_stop(tmp_path: Path) -> None:
    """Without Paceline's launcher, repeated messages would not be merged."""
    changed, _ = applied(block("python"), block("diff"))
    at = changed.index("session.checkpoints()")
    changed[at] += "\nimport os, signal, time"
    step = changed.index("        session.step(losses)")
    changed[step] += (
        "\n        time.sleep(0.05)"
        "\n        if session.progress.step == 3 and session.world.rank == 1:"
        "\n            os.kill(os.getpid(), signal.SIGTERM)"
    )
    script = tmp_path / "one.py"
    script.write_text("\n".join(changed))
    folder = tmp_path / "run"
    ended = local_ranks.run(2, [str(script)], tmp_path, extra={"PACELINE_RUN_DIR": str(folder)})
    assert [one.status for one in ended] == [143, 143]
    assert "Traceback" not in ended[0].err + ended[1].err
    assert "resumes it" not in ended[0].err + ended[0].out
    assert f"PACELINE_RUN_DIR={folder} before the same command resumes it" in ended[1].err


def test_shards_example_trains(tmp_path: Path) -> None:
    """The page's example: one process packs the shards, and both ranks train on them."""
    script, folder = tmp_path / "shards.py", tmp_path / "packed"
    text = "\n".join(block("python", "shards", "how-to/large-datasets"))
    script.write_text(text.replace('"shards"', repr(str(folder))))
    extra = {"PACELINE_RUN_DIR": str(tmp_path / "run")}
    ended = local_ranks.run_ok(2, [str(script)], tmp_path, extra=extra)
    assert "trained 80 steps, 4,995 samples" in ended[0].out
    assert len([*folder.glob("*.tar")]) > 10
