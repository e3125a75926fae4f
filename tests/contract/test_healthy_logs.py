"""Tests that no rule finds a failure in real logs of programs in which no training job failed."""

from __future__ import annotations

import lzma
from pathlib import Path

from paceline.explain.conclusion import conclude
from paceline.explain.evidence_reader import from_log
from paceline.explain.rules import load_all

LOGS = sorted((Path(__file__).parents[1] / "fixtures" / "healthy_logs").glob("*.log*"))


def read_log(path: Path) -> str:
    data = path.read_bytes()
    return (lzma.decompress(data) if path.suffix == ".xz" else data).decode(errors="replace")


def test_healthy_logs_give_no_cause() -> None:
    rules = load_all()
    conclusions = {path.name: conclude(from_log(read_log(path)), rules) for path in LOGS}
    misjudged = {name: conclusion.text for name, conclusion in conclusions.items()
               if not conclusion.is_healthy}  # fmt: skip
    assert not misjudged
    assert len(LOGS) >= 100


def test_documents_give_no_cause() -> None:
    """Covers the documentation of the rules and their tests, too."""
    root = Path(__file__).parents[2]
    folders = ("docs/**/*.md", "src/paceline/explain/**/*.md", "src/paceline/explain/**/*.py",
               "tests/unit/test_explain*.py", "tests/contract/test_rule*.py")  # fmt: skip
    paths = [path for folder in folders for path in root.glob(folder)]
    rules = load_all()
    misjudged = [
        path.name for path in paths if not conclude(from_log(read_log(path)), rules).is_healthy
    ]
    assert not misjudged
    assert len(paths) > 150


def test_finds_cause_in_log_with_markdown() -> None:
    sample = "# Answer\n\nUse `torch.load`:\n\n```python\nx = 1\n```\n\n"
    assert conclude(from_log(sample), load_all()).is_healthy
    for error_text in ("Traceback (most recent call last):\n  File \"a.py\", line 1\nKeyError: 'x'",
                  "[rank0]: torch.OutOfMemoryError: CUDA out of memory", "Killed"):  # fmt: skip
        assert not conclude(
            from_log(f"{sample}step 3 loss 2.1\n{error_text}\n"), load_all()
        ).is_healthy
