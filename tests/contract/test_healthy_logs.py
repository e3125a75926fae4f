"""Logs of programs that were really run and in which no training job failed: none is accused."""

from __future__ import annotations

import lzma
from pathlib import Path

from paceline.explain.conclusion import conclude
from paceline.explain.evidence_reader import from_log
from paceline.explain.rules import load_all

LOGS = sorted((Path(__file__).parents[1] / "fixtures" / "healthy_logs").glob("*.log*"))


def read(path: Path) -> str:
    data = path.read_bytes()
    return (lzma.decompress(data) if path.suffix == ".xz" else data).decode(errors="replace")


def test_no_healthy_log_is_accused() -> None:
    rules = load_all()
    conclusions = {path.name: conclude(from_log(read(path)), rules) for path in LOGS}
    accused = {name: conclusion.text for name, conclusion in conclusions.items()
               if not conclusion.is_healthy}  # fmt: skip
    assert not accused
    assert len(LOGS) >= 100


def test_no_document_that_quotes_messages_is_accused() -> None:
    """Not the pages of these rules either, nor their tests."""
    root = Path(__file__).parents[2]
    folders = ("docs/**/*.md", "src/paceline/explain/**/*.md", "src/paceline/explain/**/*.py",
               "tests/unit/test_explain*.py", "tests/contract/test_rule*.py")  # fmt: skip
    paths = [path for folder in folders for path in root.glob(folder)]
    rules = load_all()
    accused = [path.name for path in paths if not conclude(from_log(read(path)), rules).is_healthy]
    assert not accused
    assert len(paths) > 150


def test_a_log_with_markup_is_a_log() -> None:
    sample = "# Answer\n\nUse `torch.load`:\n\n```python\nx = 1\n```\n\n"
    assert conclude(from_log(sample), load_all()).is_healthy
    for words in ("Traceback (most recent call last):\n  File \"a.py\", line 1\nKeyError: 'x'",
                  "[rank0]: torch.OutOfMemoryError: CUDA out of memory", "Killed"):  # fmt: skip
        assert not conclude(from_log(f"{sample}step 3 loss 2.1\n{words}\n"), load_all()).is_healthy
