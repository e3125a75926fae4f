"""bench/gpu/all.py: what has a result is not run again, and what was cut off is."""

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
    sys.modules[spec.name] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module


def start(script: Any, out: Path, seconds: float, *parts: str) -> Any:
    return script.Bench(Namespace(out=out, dry=True, seconds=seconds, parts=parts))


def test_cases_that_were_cut_off_are_run_by_a_later_start(script: Any, tmp_path: Path) -> None:
    runs, work = tmp_path / "runs", tmp_path / "work"
    runs.write_text("")
    body = f"open({str(runs)!r}, 'a').write('NAME ')"
    cases = [
        script.Case(name, ["-c", body.replace("NAME", name)], clears=[work / name])
        for name in ("first", "second")
    ]
    (work / "second").mkdir(parents=True)
    start(script, tmp_path, 20).run_all("part", cases[:1])
    (work / "first").mkdir()
    results = start(script, tmp_path, 1).run_all("part", cases)  # too little for a case
    assert [(each["case"], script.CUT in each) for each in results] == [
        ("first", False),
        ("second", True),
    ]
    results = start(script, tmp_path, 20).run_all("part", cases)
    assert [(each["case"], each["exit"]) for each in results] == [("first", [0]), ("second", [0])]
    assert runs.read_text() == "first second "
    assert (work / "first").exists()  # what others are compared with
    assert not (work / "second").exists()
    start(script, tmp_path, 20, "part").run_all("part", cases[:1])
    assert runs.read_text() == "first second first "


def test_a_case_that_ends_at_the_budget_has_no_whole_result(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "MIN_CASE_S", 0.1)
    sleeping = ["-c", "import time; time.sleep(60)"]
    bench = start(script, tmp_path, 0.6)
    (cut,) = bench.run_all("part", [script.Case("sleeps", sleeping)])
    assert cut["ended at the limit"] == [0]
    assert script.CUT in cut
    bench = start(script, tmp_path, 20)
    (hung,) = bench.run_all("part", [script.Case("sleeps", sleeping, limit_s=0.3)])
    assert hung["ended at the limit"] == [0]
    assert script.CUT not in hung  # it is the case's own limit


def test_results_survive_cases_that_end_together_and_a_cut(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is written, and a file that was cut in the middle counts as missing."""
    bench = start(script, tmp_path, 60)
    bench.dry = False  # four at a time
    monkeypatch.setattr(bench, "run", lambda case: {"case": case.name, "text": "x" * 20_000})
    cases = [script.Case(f"{number}", []) for number in range(40)]
    bench.run_all("ranks", cases)
    results = json.loads((tmp_path / "ranks.json").read_text())
    assert {each["case"] for each in results} == {case.name for case in cases}
    assert (tmp_path / "result.md").read_text().count("xxx |") == 40
    (tmp_path / "ranks.json").write_text('[{"case": "0", "te')
    assert len(bench.run_all("ranks", cases)) == 40


def test_an_unknown_part_is_refused(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["all.py", "out", "recovry"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2


def test_fast_recoveries_count(script: Any, tmp_path: Path) -> None:
    folder = tmp_path / "work" / "killed"
    folder.mkdir(parents=True)
    (folder / "lost.1.20").write_text("100.0")
    records = [[99.9, 19, True, 0, 3], [100.05, 20, True, 0, 2], [100.15, 21, True, 0, 3]]
    (folder / "steps.0.1").write_text("".join(json.dumps(each) + "\n" for each in records))
    result = script.judge_run(start(script, tmp_path, 20), "killed", is_compared=False)
    assert result["trains again after s"] == [0.05]
    assert result["complete again after s"] == [0.15]
