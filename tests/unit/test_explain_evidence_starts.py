"""Tests that only the last of several starts in a run directory is explained."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.explain.evidence_reader import from_run


def test_evidence_ignores_previous_starts(tmp_path: Path) -> None:
    def start(*ranks: int) -> list[dict[str, object]]:
        return [
            {"event": "connected", "hosts": ["n1"]},
            {"event": "started", "attempt": 0, "world_size": len(ranks)},
            *({"event": "rank started", "host": "n1", "rank": rank, "pid": 7} for rank in ranks),
        ]

    first = "FileNotFoundError: [Errno 2] No such file or directory: 'aaa.txt'\n"
    events = [*start(0, 1), {"event": "exception", "host": "n1", "rank": 0, "type": "KeyError"},
              *start(0), {"event": "log begins", "host": "n1", "rank": 0, "bytes": len(first)},
              {"event": "started", "attempt": 1, "world_size": 1}]  # fmt: skip
    text = "".join(json.dumps({"time": 1.0, **event}) + "\n" for event in events)
    (tmp_path / "events.jsonl").write_text(text)
    (tmp_path / "result.json").write_text('{"exit_code": 1}')
    (tmp_path / "logs/n1").mkdir(parents=True)
    (tmp_path / "logs/n1/0.log").write_text(first + "ValueError: now\n")
    (tmp_path / "logs/n1/1.log").write_text(first)
    evidence = from_run(tmp_path)
    assert [log.lines for log in evidence.logs] == [("ValueError: now",)]
    assert [event.kind for event in evidence.events][-1] == "started"
    assert "exception" not in {event.kind for event in evidence.events}
