"""Tests that only the last start and the last attempt in a run directory are explained."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.explain.conclusion import conclude
from paceline.explain.evidence import Evidence
from paceline.explain.evidence_reader import from_run
from paceline.explain.rules import load_all
from paceline.report.explanation import lines
from paceline.spec.events import Event


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


def test_evidence_is_of_last_attempt(tmp_path: Path) -> None:
    """A rank was killed and all ranks started again, rank 1 on another host."""

    def started(host: str, rank: int) -> dict[str, object]:
        return {"event": "rank started", "host": host, "rank": rank, "pid": 7}

    def ended(host: str, rank: int, code: int | None, number: int | None) -> dict[str, object]:
        end = {"event": "rank ended", "host": host, "rank": rank, "code": code, "signal": number}
        return {**end, "peak_bytes": 0}

    lost = "RuntimeError: Connection closed by peer [10.0.0.2]:57252\n"
    oom = {"kills": 1, "limit": None, "kernel": ["Out of memory: Killed process 7 (python)"]}
    events = [
        {"event": "connected", "hosts": ["n1", "n2"]},
        {"event": "started", "attempt": 0, "world_size": 2},
        started("n1", 0), started("n2", 1),
        {**ended("n2", 1, None, 9), "memory": oom}, ended("n1", 0, 1, None),
        {"event": "ended", "attempt": 0, "exit_code": 137, "seconds": 1.0},
        {"event": "lost", "host": "n2", "why": "no answer"},
        {"event": "log begins", "host": "n1", "rank": 0, "bytes": len(lost)},
        started("n1", 0),
        {"event": "started", "attempt": 1, "world_size": 2},
        started("n3", 1),
        ended("n1", 0, 1, None), ended("n3", 1, None, 15),
        {"event": "ended", "attempt": 1, "exit_code": 1, "seconds": 1.0},
    ]  # fmt: skip
    text = "".join(json.dumps({"time": 1.0, **event}) + "\n" for event in events)
    (tmp_path / "events.jsonl").write_text(text)
    failure = {"kind": "exit", "host": "n1", "rank": 0, "code": 1, "headline": "exit status 1"}
    (tmp_path / "result.json").write_text(json.dumps({"exit_code": 1, "first_failure": failure}))
    for host, rank, log in (("n1", 0, f"{lost}quota used up\n"), ("n2", 1, lost), ("n3", 1, "")):
        (tmp_path / "logs" / host).mkdir(parents=True)
        (tmp_path / "logs" / host / f"{rank}.log").write_text(log)
    evidence = from_run(tmp_path)
    assert [(log.label, log.lines) for log in evidence.logs] == [
        ("rank 0 on n1", ("quota used up",)), ("rank 1 on n3", ())
    ]  # fmt: skip
    assert [(end.host, end["signal"]) for end in evidence.exits] == [("n1", None), ("n3", 15)]
    assert evidence.losses == ("n2: no answer; all ranks were started again",)
    conclusion = conclude(evidence, load_all())
    assert conclusion.text == "unknown cause: rank 0 on n1: exit status 1"
    (tmp_path / "logs/n3/1.log").write_text(f"Traceback (most recent call last):\n{lost}")
    output = "\n".join(lines(conclusion, from_run(tmp_path)))
    assert "last lines of rank 0 on n1:\n    quota used up\n" in output
    assert "a consequence of it (rank 1 on n3):\n    Traceback" in output
    assert "to look at: The last lines of logs/n1/0.log, and what ends the process with" in output


def test_evidence_of_rank_replaced_in_place_is_of_its_last_process() -> None:
    def ended(host: str, signal: int) -> Event:
        return Event("rank ended", host, 1, fields={"code": None, "signal": signal})

    start = Event("rank started", "n2", 1)
    events = (Event("rank started", "n1", 0), start, ended("n2", 9), start, ended("n2", 15))
    assert [end["signal"] for end in Evidence(events=events).exits] == [15]


def test_rerun_uses_checkpoints_in_projects_of_hosts() -> None:
    assert "files/HOST" in Evidence().rerun_effect
    assert Evidence(checkouts={"n1": "/home/me/p"}).rerun_effect.endswith("knows of none")
