"""Tests evaluation with lm-eval, replaced by a stub: its arguments and the printed results."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny_language_model
from recipe_tools import hub_variables, one_thread  # noqa: F401 - fixtures

from paceline.recipes.language.sft import main
from paceline.recipes.use import evaluate

lacks_peft = importlib.util.find_spec("peft") is None
pytestmark = pytest.mark.skipif(lacks_peft, reason="peft is not installed")
RESULTS = {
    "quiz": {"alias": "quiz", "acc,none": 0.25, "acc_stderr,none": 0.0625, "bleu,first": 3.0},
    "other": {"exact,none": 1.0, "exact_stderr,none": "N/A"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a model for one step; returns the run directory."""
    folder = tmp_path_factory.mktemp("tasks")
    tiny_language_model.save(folder / "base")
    tiny_language_model.write_jsonl(folder / "chat.jsonl", tiny_language_model.chats(4))
    flags = [f"--model={folder}/base", f"--data={folder}/chat.jsonl", f"--run-dir={folder}/run"]
    assert main([*flags, "--device=cpu", "--steps=1", "--samples=0"]) == 0
    return folder / "run"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replaces lm-eval by a stub; returns the arguments of its calls."""
    recorded_calls: list[dict[str, Any]] = []
    names = ("lm_eval", "lm_eval.models", "lm_eval.models.huggingface", "lm_eval.tasks")
    stubs: dict[str, Any] = {name: ModuleType(name) for name in names}

    class TaskManager:
        def match_tasks(self, names: list[str]) -> list[str]:
            return [name for name in names if name in RESULTS]

    def simple_evaluate(**arguments: Any) -> dict[str, Any]:
        recorded_calls.append(arguments)
        return {"results": RESULTS}

    stubs["lm_eval.tasks"].TaskManager = TaskManager
    stubs["lm_eval"].simple_evaluate = simple_evaluate
    stubs["lm_eval.models.huggingface"].HFLM = lambda **arguments: arguments
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    return recorded_calls


def test_evaluates_tasks_and_prints_metrics(
    run: Path, calls: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.yaml").touch()
    tasks = f"--tasks=quiz,{tmp_path}/own.yaml"
    capsys.readouterr()
    figures = f"--figures={tmp_path}/figures.json"
    flags = [f"--run={run}", "--device=cpu", tasks, "--limit=5", figures]
    assert evaluate.main(flags) == 0
    assert capsys.readouterr().out.splitlines() == [
        "quiz: acc 0.2500 ± 0.0625, bleu (first) 3.0000",
        "other: exact 1.0000",
    ]
    assert json.loads((tmp_path / "figures.json").read_text()) == {"tasks": RESULTS}
    (call,) = calls
    assert (call["tasks"], call["limit"]) == (["quiz", f"{tmp_path}/own.yaml"], 5)
    assert call["apply_chat_template"]
    assert not call["model"]["pretrained"].training
    assert any("lora_" in name for name, _ in call["model"]["pretrained"].named_parameters())


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--tasks=quizz"], "lm-eval has no such task"),
        (["--tasks=missing.yaml"], "no such file"),
        (["--tasks=quiz", "--split=val"], "--split has no effect with --tasks"),
        (["--limit=3"], "--limit has no effect without --tasks"),
    ],
)
def test_rejects_invalid_task_options(
    flags: list[str],
    problem: str,
    run: Path,
    calls: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert evaluate.main([f"--run={run}", "--device=cpu", *flags]) == 2
    assert problem in capsys.readouterr().err
    assert not calls


def test_missing_lm_eval_error_names_package(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert evaluate.main([f"--run={run}", "--tasks=quiz"]) == 2
    assert "pip install --upgrade lm-eval" in capsys.readouterr().err
