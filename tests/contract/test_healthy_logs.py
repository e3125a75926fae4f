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
