"""Benchmarks of lm-eval for the language model of a run: ``paceline evaluate RUN --tasks``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline import train
from paceline.program import library
from paceline.recipes.argv import check_at_least
from paceline.recipes.use import EvaluateOptions
from paceline.recipes.use.evaluate import local_session, module_of
from paceline.recipes.use.language_models import Generator
from paceline.spec.errors import SettingError

_BATCH = 8
_DATA_OPTIONS = ("split", "data", "target", "data_dir")


def evaluate_tasks(options: EvaluateOptions) -> None:
    """Evaluates tasks of lm-eval in this process, and prints the metrics of each.

    Raises:
        SettingError: The run holds no language model, lm-eval is missing, or a task is unknown.
    """
    check_at_least("--limit", options.limit, 0)
    if used := [name for name in _DATA_OPTIONS if getattr(options, name)]:
        raise SettingError(
            f"--{used[0].replace('_', '-')} has no effect with --tasks",
            found="tasks have data of their own",
            remedy="leave it out",
        )
    module = module_of(options.run)
    if not hasattr(module, "load_generator"):
        raise SettingError(
            f"{options.run} holds no language model, and --tasks are for language models",
            remedy=f"paceline evaluate {options.run}",
        )
    harness = library("lm_eval", "--tasks are evaluated")
    models = library("lm_eval.models.huggingface", "--tasks are evaluated")
    manager = library("lm_eval.tasks", "--tasks are evaluated").TaskManager()
    tasks = [find_task(name.strip(), manager) for name in options.tasks.split(",")]
    config = train.load_config(Path(options.run))
    with local_session(options.device, config) as session:
        generator: Generator = module.load_generator(options.run, session)
        tokenizer = generator.tokenizer
        begins_text = generator.encode("a")[0] == tokenizer.bos_token_id
        model = models.HFLM(
            pretrained=generator.model,
            tokenizer=tokenizer,
            batch_size=_BATCH,
            mixed_precision_dtype=session.precision.compute,
            add_bos_token=True if begins_text else None,
        )
        output = harness.simple_evaluate(
            model=model,
            tasks=tasks,
            task_manager=manager,
            limit=options.limit or None,
            apply_chat_template=generator.is_chat,
            log_samples=False,
        )
        if options.figures:
            content = json.dumps({"tasks": output["results"]}, default=str)
            Path(options.figures).write_text(content + "\n", encoding="utf-8")
        for line in describe(output["results"]):
            session.say(line)


def find_task(name: str, manager: Any) -> str:
    """Returns a task's name, or the absolute path of a file that describes one.

    Raises:
        SettingError: There is no such task or file.
    """
    path = Path(name).absolute()
    if name.endswith((".yaml", ".yml")):
        if not path.is_file():
            raise SettingError(f"--tasks {name}: no such file", found=f"no {path}")
        return str(path)
    if not name or not manager.match_tasks([name]):
        raise SettingError(
            f"--tasks {name}: lm-eval has no such task", remedy="lm-eval ls tasks lists all"
        )
    return name


def describe(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields a line for each task: its metrics, with their standard errors if there are any."""
    for task, figures in results.items():
        parts = []
        for key, value in figures.items():
            metric, has_filter, name = key.partition(",")
            if not has_filter or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            label = metric if name == "none" else f"{metric} ({name})"
            error = figures.get(f"{metric}_stderr,{name}")
            spread = f" ± {error:.4f}" if isinstance(error, float) else ""
            parts.append(f"{label} {value:.4f}{spread}")
        yield f"{task}: {', '.join(parts)}"
