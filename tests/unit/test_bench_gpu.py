"""Tests that bench/gpu/all.py skips cases with a result and repeats interrupted ones."""

from __future__ import annotations

import importlib.util
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "bench/gpu/all.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("bench_gpu_all", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # needed by its dataclasses
    spec.loader.exec_module(module)
    return module


def make_bench(script: Any, out: Path, seconds: float, *parts: str) -> Any:
    return script.Bench(Namespace(out=out, dry=True, seconds=seconds, parts=parts))


def test_restart_runs_interrupted_cases(script: Any, tmp_path: Path) -> None:
    runs, work = tmp_path / "runs", tmp_path / "work"
    runs.write_text("")
    body = f"open({str(runs)!r}, 'a').write('NAME ')"
    cases = [
        script.Case(name, ["-c", body.replace("NAME", name)], clears=[work / name])
        for name in ("first", "second")
    ]
    (work / "second").mkdir(parents=True)
    make_bench(script, tmp_path, 20).run_all("part", cases[:1])
    (work / "first").mkdir()
    results = make_bench(script, tmp_path, 1).run_all("part", cases)  # too short for a case
    assert [(record["case"], script.CUT in record) for record in results] == [
        ("first", False),
        ("second", True),
    ]
    results = make_bench(script, tmp_path, 20).run_all("part", cases)
    assert [(record["case"], record["exit"]) for record in results] == [
        ("first", [0]),
        ("second", [0]),
    ]
    assert runs.read_text() == "first second "
    assert (work / "first").exists()  # the reference for other cases
    assert not (work / "second").exists()
    make_bench(script, tmp_path, 20, "part").run_all("part", cases[:1])
    assert runs.read_text() == "first second first "


def test_case_stopped_by_budget_is_marked_incomplete(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "MIN_CASE_S", 0.1)
    sleeping = ["-c", "import time; time.sleep(60)"]
    bench = make_bench(script, tmp_path, 0.6)
    (interrupted,) = bench.run_all("part", [script.Case("sleeps", sleeping)])
    assert interrupted["ended at the limit"] == [0]
    assert script.CUT in interrupted
    bench = make_bench(script, tmp_path, 20)
    (hung,) = bench.run_all("part", [script.Case("sleeps", sleeping, limit_s=0.3)])
    assert hung["ended at the limit"] == [0]
    assert script.CUT not in hung  # ended by its own time limit


def test_results_survive_concurrent_cases_and_truncation(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A results file that was truncated counts as missing."""
    bench = make_bench(script, tmp_path, 60)
    bench.dry = False  # runs four cases at a time
    monkeypatch.setattr(bench, "run", lambda case: {"case": case.name, "text": "x" * 20_000})
    cases = [script.Case(f"{number}", []) for number in range(40)]
    bench.run_all("ranks", cases)
    results = json.loads((tmp_path / "ranks.json").read_text())
    assert {record["case"] for record in results} == {case.name for case in cases}
    assert (tmp_path / "result.md").read_text().count("xxx |") == 40
    (tmp_path / "ranks.json").write_text('[{"case": "0", "te')
    assert len(bench.run_all("ranks", cases)) == 40


def test_rejects_unknown_part(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["all.py", "out", "recovry"])
    with pytest.raises(SystemExit) as exit_info:
        script.main()
    assert exit_info.value.code == 2


def test_measures_fast_recoveries(script: Any, tmp_path: Path) -> None:
    folder = tmp_path / "work" / "killed"
    folder.mkdir(parents=True)
    (folder / "lost.1.20").write_text("100.0")
    records = [[99.9, 19, True, 0, 3], [100.05, 20, True, 0, 2], [100.15, 21, True, 0, 3]]
    (folder / "steps.0.1").write_text("".join(json.dumps(record) + "\n" for record in records))
    result = script.judge_run(make_bench(script, tmp_path, 20), "killed", is_compared=False)
    assert result["trains again after s"] == [0.05]
    assert result["complete again after s"] == [0.15]
