"""bench/gpu/all.py: what it makes of the records of a training."""

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


def test_fast_recoveries_count(script: Any, tmp_path: Path) -> None:
    folder = tmp_path / "work" / "killed"
    folder.mkdir(parents=True)
    (folder / "lost.1.20").write_text("100.0")
    records = [[99.9, 19, True, 0, 3], [100.05, 20, True, 0, 2], [100.15, 21, True, 0, 3]]
    (folder / "steps.0.1").write_text("".join(json.dumps(each) + "\n" for each in records))
    result = script.judge_run(start(script, tmp_path, 20), "killed", is_compared=False)
    assert result["trains again after s"] == [0.05]
    assert result["complete again after s"] == [0.15]
