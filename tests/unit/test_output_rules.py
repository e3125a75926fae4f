"""Tests where files of a script are stored in its project, and when a checkpoint is complete."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.rundir.output_rules import (
    PathState,
    WrittenFile,
    checkpoint_names,
    group_files,
    is_checkpoint,
    is_complete,
    kept_out_reason,
    matches_earlier,
    order_of_arrival,
    rank_0_twin,
    split_growing_logs,
    superseded_units,
    unit_of,
)

OWN_FOLDER = PathState(in_own_folder=True)
USER_FOLDER = PathState()


@pytest.mark.parametrize("path", [
    "out/ckpt_10.pt", "out/checkpoint-500/trainer_state.json", "out/hparams.yaml",
    "out/dcp/.metadata", "out/dcp/__0_0.distcp", "out/latest", "out/a/chat_template.jinja",
    "out/checkpoint-5/random_states_0.pkl", "runs/x/events.out.tfevents.17000.host.12.0",
    "out/README.md", "out/epoch=3-step=40.ckpt", "out/last_checkpoint", "out/checkpoint",
    "out/zustand-30/random_states_0.pkl", "out/zustand-30/custom_checkpoint_0.pkl",
    "out/latest_checkpointed_iteration.txt", "out/model_best", "out/step=40",
])  # fmt: skip
def test_accepts_results_in_own_folder(path: str) -> None:
    assert kept_out_reason(path, OWN_FOLDER) == ""


@pytest.mark.parametrize("path", [
    "model.pt", "results.json", "out/log.txt", "plots/loss.png", "out/last.ckpt", "out/.metadata",
])  # fmt: skip
def test_accepts_data_files_in_user_folders(path: str) -> None:
    assert kept_out_reason(path, USER_FOLDER) == ""


@pytest.mark.parametrize("path", [
    "train.py", "out/train.py", "out/TRAIN.PY", "out/x.pyc", "out/lib.so", "run.sh", "out/run.sh",
    "Makefile", "out/Makefile", "out/makefile", "paceline.toml", "out/paceline.toml", "setup.cfg",
    "pyproject.toml", "out/pyproject.toml", "pyproject.toml/x.pt/y.py", "out/Dockerfile",
    ".bashrc", ".git/config", "out/.git/hooks/x.pt", ".venv/x.pt", "out/.envrc", "out/.metadata/x",
    "\u200b.git/x.pt", "out/\u200b.envrc", "\uff0eenvrc", "out/train.py.", "out/train.py ",
    "out/train.\u200bpy", "out/x.\uff50\uff59", "../x.pt", "/etc/x.pt", "out//x.pt", "out/./x.pt",
    "out/x\n.pt", "out/HEAD", "-rf", "out/--checkpoint-action=exec.txt", "out/a:b.txt",
    "out/a\\b.pt", "venv/lib/python3.12/site-packages/evil.pth", "out/site-packages/evil.pth",
    "requirements.txt", "out/requirements.txt", "package.json", "CMakeLists.txt", "out/a.ipynb",
    "out/a.html", "out/a.svg", "out/a.desktop", "~/x.pt", "out/conf.ini", "out/__pycache__/x.pt",
    "runs/a/plan.json", "runs/a/b/events.jsonl", "Runs/a/Detached.json",
    "runs/b/checkpoints/9/manifest.json",
    "requirements-dev.txt", "out/dev-requirements.txt", "out/lefthook.json", "out/default.nix",
    "out/compose.yaml", "out/compose.override.yaml", "out/CLAUDE.md", "out/x.hcl",
    "out/libc.so.6",
    "events.out.tfevents.x.mk", "events.out.tfevents.17000.n1.py", "out/events.out.tfevents.1.so",
    "jupyter_server_config.json", "Jupyter_Lab_Config.json", "infra/x.tf.json", "opencode.json",
    "env/etc/conda/env_vars.d/x.json", "env/conda-meta/x.json", "host_vars/n1.json",
    "venv/share/jupyter/kernels/python3/kernel.json", "venv/etc/jupyter/x/y.json",
    "CMakePresets.json", "jest.config.json", "out/mcp.json", "events.out.tfevents.1.n1.pkl",
    "x.dist-info/entry_points.txt", "out/X.Dist-Info/entry_points.txt", "a.egg-info/top_level.txt",
    "out/a.egg-link",
    "HEAD", "out/a.service", "cache/features.pkl", "out/x.joblib", "out/ckpt.pt.tmp", "own.tmp",
    "random_states_0.pkl", "out/states_0.pkl",
])  # fmt: skip
@pytest.mark.parametrize("state", [OWN_FOLDER, USER_FOLDER])
def test_rejects_code_settings_and_unsafe_names(path: str, state: PathState) -> None:
    assert kept_out_reason(path, state) != ""


@pytest.mark.parametrize(
    "path",
    ["conf/db.yaml", "notes.md", "templates/a.jinja", "latest", "x.0", "checkpoint", "bin/model"],
)
def test_user_folders_accept_only_data(path: str) -> None:
    assert kept_out_reason(path, USER_FOLDER) != ""


@pytest.mark.parametrize(("state", "arrives"), [
    (PathState(exists=True), False),
    (PathState(exists=True, is_own_output=True), True),
    (PathState(exists=True, in_own_folder=True), False),  # the user has changed it
    (PathState(was_sent=True, exists=True), False),
    (PathState(was_sent=True), False),  # the user has just removed it
    (PathState(was_sent=True, is_own_output=True, exists=True), False),
])  # fmt: skip
def test_replaces_only_own_output(state: PathState, arrives: bool) -> None:
    assert (kept_out_reason("out/ckpt.pt", state) == "") is arrives


@pytest.mark.parametrize(("path", "unit"), [
    ("out/checkpoint-500/optimizer.pt", "out/checkpoint-500"),
    ("out/checkpoint-500/global_step3/x.pt", "out/checkpoint-500"),
    ("out/ep_2/optimizer.bin", "out/ep_2"),
    ("out/eps_0.1/a.png", "out/eps_0.1/a.png"),
    ("step_3/a/b.bin", "step_3"),
    ("logs/version_0/checkpoints/epoch=1-step=2.ckpt", None),
    ("out/ckpt_5.pt", None),
    ("exp2024/model.pt", None),
])  # fmt: skip
def test_unit_of_checkpoint_folder(path: str, unit: str | None) -> None:
    assert unit_of(path) == (unit or path)


@pytest.mark.parametrize(("name", "expected"), [
    ("checkpoint", True), ("model-40", True), ("last.ckpt", True),
    ("latest", False), ("last_checkpoint", False), ("Makefile", False), ("run", False),
])  # fmt: skip
def test_is_checkpoint_without_suffix(name: str, expected: bool) -> None:
    assert is_checkpoint(f"out/{name}", [f"out/{name}"]) is expected


def files(*ages: tuple[str, float], state: str = "unknown") -> list[WrittenFile]:
    return [WrittenFile(path, 1, 1, age_s, state) for path, age_s in ages]


def test_groups_shards_of_folder() -> None:
    groups = group_files(files(("out/a/__0_0.distcp", 0), ("out/a/.metadata", 0), ("out/b.pt", 0)))
    assert {unit: len(group) for unit, group in groups.items()} == {"out/a": 2, "out/b.pt": 1}


@pytest.mark.parametrize(("names", "is_grouped"), [
    (["model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"], True),
    (["model_1.safetensors", "random_states_0.pkl"], True),
    (["pytorch_model.bin", "optimizer_1.bin"], True),
    (["model.safetensors", "training_args.bin", "tokenizer.json"], False),
    (["optimizer.bin", "scheduler.bin"], False),
])  # fmt: skip
def test_groups_files_of_accelerates_save_state(names: list[str], is_grouped: bool) -> None:
    """Whatever the folder's name is."""
    groups = group_files(files(*((f"out/zustand-30/{name}", 0) for name in names)))
    assert (list(groups) == ["out/zustand-30"]) is is_grouped
    assert len(group_files(files(*((name, 0) for name in names)))) == len(names)
    others = "out/zustand-30/log.txt", "out/zustand-30/checkpoint-5/a.pt"
    groups = group_files(
        files(*((f"out/zustand-30/{name}", 0) for name in names), *((o, 0) for o in others))
    )
    assert {"out/zustand-30/log.txt", "out/zustand-30/checkpoint-5"} <= groups.keys()


def test_rank_0_twin_tries_few_numbers_of_a_path() -> None:
    class Paths(list[str]):
        num_lookups = 0

        def __contains__(self, path: object) -> bool:
            self.num_lookups += 1
            return super().__contains__(path)

    paths = Paths(["a/rank_0/step_5_rank_3.pt"])
    assert rank_0_twin("a/rank_3/step_5_rank_3.pt", paths) == paths[0]
    paths.num_lookups = 0
    assert rank_0_twin("/".join(["rank_1"] * 500), paths) == ""
    assert paths.num_lookups <= 16


def test_splits_growing_log_from_folder() -> None:
    """A log delays other files only in a real checkpoint, of which a vocabulary is a part."""

    def split(*ages: tuple[str, float]) -> dict[str, int]:
        split = split_growing_logs(group_files(files(*ages)))
        return {unit: len(group) for unit, group in split.items()}

    assert split(("epochs10_lr3/a.pt", 11.0), ("epochs10_lr3/b/log.txt", 0.5)) == {
        "epochs10_lr3": 1, "epochs10_lr3/b/log.txt": 1
    }  # fmt: skip
    assert split(("epochs10_lr3/a.pt", 9.0), ("epochs10_lr3/log.txt", 0.5)) == {"epochs10_lr3": 2}
    assert split(("step_1/a.pt", 11.0), ("step_1/merges.txt", 0.5)) == {"step_1": 2}
    assert split(("step_1/log.txt", 0.5)) == {"step_1": 1}


@pytest.mark.parametrize(("unit", "group", "complete"), [
    ("a.pt", files(("a.pt", 2.9)), False),
    ("a.pt", files(("a.pt", 3.1)), True),
    ("a.pt", files(("a.pt", 99.0), state="cut off"), False),
    ("a.pt", files(("a.pt", 0.0), state="whole"), True),
    ("step_1", files(("step_1/a.pt", 1.0), state="whole"), False),
    ("step_1", files(("step_1/a.pt", 9.0)), False),
    ("step_1", files(("step_1/a.pt", 11.0)), True),
    ("step_1", files(("step_1/a.pt", 4.0), ("step_1/trainer_state.json", 3.5)), True),
    ("step_1", files(("step_1/a.pt", 1.0), ("step_1/trainer_state.json", 3.5)), False),
    ("d", files(("d/__0_0.distcp", 5.0), ("d/.metadata", 4.0)), True),
])  # fmt: skip
def test_unchanged_unit_is_complete(unit: str, group: list[WrittenFile], complete: bool) -> None:
    assert is_complete(unit, group) is complete
    has_last = any("trainer_state" in file.path or ".metadata" in file.path for file in group)
    assert is_complete(unit, group, has_ended=True) is (complete or has_last)


def test_superseded_checkpoint_is_complete() -> None:
    """If a script crashes in a save, the previous checkpoint is complete despite recent changes."""

    def written(unit: str, *times: int) -> list[WrittenFile]:
        return [WrittenFile(f"{unit}/{time}.pt", 1, time, 1.0, "whole") for time in times]

    groups = {unit: written(unit, *times) for unit, times in
              {"a/step_1": (1, 2), "a/step_2": (3, 4), "a/step_3": (4, 5), "b/step_4": (6, 7),
               "c/step_1": (1, 4), "c/step_2": (3, 5)}.items()}  # fmt: skip
    assert superseded_units(groups) == {"a/step_1", "a/step_2"}
    group = groups["a/step_1"]
    assert not is_complete("a/step_1", group, has_ended=True)
    assert is_complete("a/step_1", group, has_ended=True, is_superseded=True)
    assert not is_complete("a/step_1", group, is_superseded=True)
    settled = [replace(file, age_s=3.1) for file in group]
    assert is_complete("a/step_1", settled, is_superseded=True)
    assert not is_complete("a/step_1", settled)
    cut_off = [WrittenFile("a/step_1/x.pt", 1, 1, 1.0, "cut off"), *group]
    assert not is_complete("a/step_1", cut_off, has_ended=True, is_superseded=True)


def test_arrival_order_and_checkpoint_names() -> None:
    groups = group_files([WrittenFile("a.pt", 1, 5), WrittenFile("b.pt", 1, 9)])
    assert order_of_arrival(groups) == ["b.pt", "a.pt"]
    assert is_checkpoint("a", ["a/model.SAFETENSORS"])
    assert not is_checkpoint("log.txt", ["log.txt"])


def test_checkpoint_folder_with_files_of_the_one_before_is_complete() -> None:
    times = {"c/step_1/a.pt": 1, "c/step_2/a.pt": 2, "c/step_2/rng_0.pkl": 2, "d/step_3/a.pt": 3}
    names = checkpoint_names(times)
    files = [WrittenFile("c/step_3/a.pt", 1, 4), WrittenFile("c/step_3/rng_0.pkl", 1, 4)]
    assert matches_earlier("c/step_3", files, names)
    assert not matches_earlier("c/step_3", files[:1], names)
    assert not matches_earlier("e/step_3", files, names)
    names = checkpoint_names(times | {"c/step_2/part-2.pt": 2, "c/step_2/part-1.pt": 2})
    parts = [WrittenFile(f"c/step_3/part-{number}.pt", 1, 4) for number in (1, 2)]
    assert matches_earlier("c/step_3", [*files, *parts], names)
    assert not matches_earlier("c/step_3", [*files, *parts[:1]], names)
