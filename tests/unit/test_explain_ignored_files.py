"""Tests that explain recognises a missing file that git ignores, and that its remedy sends it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from paceline.explain.conclusion import conclude
from paceline.explain.evidence_reader import _is_data, from_run
from paceline.explain.rules import load_all
from paceline.transfer.tree import files_of

COPY = "/run/user/0/paceline/job/code"


def write_run(folder: Path, project: Path, missing: str, error: str = "") -> Path:
    """Writes a run in which rank 1 did not find a path in its copy of the project."""
    events = [
        {"event": "connected", "hosts": ["n1"]},
        {"event": "copied", "host": "n1", "copy": COPY, "home": str(project)},
        {"event": "started", "attempt": 0, "world_size": 2},
        {"event": "rank started", "host": "n1", "rank": 1, "pid": 7},
    ]
    (folder / "logs/n1").mkdir(parents=True)
    text = "".join(json.dumps({"time": 1.0, **event}) + "\n" for event in events)
    (folder / "events.jsonl").write_text(text)
    (folder / "result.json").write_text('{"exit_code": 1}')
    error = error or f"FileNotFoundError: [Errno 2] No such file or directory: '{COPY}/{missing}'"
    (folder / "logs/n1/1.log").write_text(f"{error}\n")
    script = {"kind": "script", "target": "train/main.py"}
    node = {"host": "n1", "workdir": f"{COPY}/sub", "entry": script}
    (folder / "plan.json").write_text(json.dumps({"nodes": [node]}))
    return folder


def test_remedy_sends_git_ignored_file(tmp_path: Path) -> None:
    project = tmp_path / "my project"
    (project / "configs").mkdir(parents=True)
    (project / "train").mkdir()
    (project / "configs/compiled.json").write_text("{}")
    (project / ".gitignore").write_text("compiled.json\n")
    subprocess.run(["git", "init", "-q", project], check=True)
    assert "configs/compiled.json" not in set(files_of(project))

    run = write_run(tmp_path / "run", project, "train/../configs/compiled.json")
    rule, match = conclude(from_run(run), load_all()).matches[0]
    assert rule.code == "missing-file"
    reason = "was not sent to the host, because git ignores it"
    assert f"{project}/configs/compiled.json {reason}" in match.cause
    confirm, remedy = match.confirm.strip("`"), re.findall("`([^`]+)`", match.remedy)[0]
    subprocess.run(confirm, shell=True, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(remedy, shell=True, check=True)
    assert "configs/compiled.json" in set(files_of(project))


def test_remedy_sends_folder_outside_project(tmp_path: Path) -> None:
    data = tmp_path / "my data/train.bin"
    data.parent.mkdir()
    data.touch()
    error = f"FileNotFoundError: [Errno 2] No such file or directory: '{data}'"
    run = write_run(tmp_path / "run", tmp_path / "project", "", error)
    rule, match = conclude(from_run(run), load_all()).matches[0]
    assert rule.code == "missing-file"
    assert f"{data} is on the launching machine, but not on the host" in match.cause
    assert f"--data '{data.parent}'" in match.remedy


@pytest.mark.parametrize("path", ["/usr/bin/env", "/etc/hosts", "/tmp/.hidden/file"])
def test_remedy_sends_no_system_folder(tmp_path: Path, path: str) -> None:
    assert not _is_data(path, str(tmp_path))
    assert _is_data("/data/images/a.png", str(tmp_path))
    assert not _is_data(str(tmp_path.parent / "a.bin"), str(tmp_path))


def test_locally_missing_file_is_not_blamed_on_git(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / ".gitignore").write_text("*.json\n")
    (project / "sent.txt").write_text("")
    subprocess.run(["git", "init", "-q", project], check=True)
    for missing in ("none.json", "sent.txt"):
        run = write_run(tmp_path / missing, project, missing)
        _, match = conclude(from_run(run), load_all()).matches[0]
        assert "git" not in match.cause
        assert not match.remedy


@pytest.mark.parametrize(
    ("error", "file"),
    [
        ("FileNotFoundError: [Errno 2] No such file or directory: 'a.yaml'", "sub/a.yaml"),
        ("ModuleNotFoundError: No module named '_version'", "_version.py"),
        ("ModuleNotFoundError: No module named 'fast.kernels'", "sub/fast/kernels.cpython-311.so"),
        ("ModuleNotFoundError: No module named 'made'", "sub/train/made/__init__.py"),
    ],
)
def test_looks_up_paths_and_modules_in_work_folder(tmp_path: Path, error: str, file: str) -> None:
    project = tmp_path / "project"
    (project / file).parent.mkdir(parents=True)
    (project / file).write_text("")
    (project / ".gitignore").write_text(f"{file}\n")
    subprocess.run(["git", "init", "-q", project], check=True)
    run = write_run(tmp_path / "run", project, "", error)
    _, match = conclude(from_run(run), load_all()).matches[0]
    assert f"{project}/{file} was not sent to the host, because git ignores it" in match.cause
    assert "git -C" in match.remedy


def test_ignored_folder_is_sent_with_data_option(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "data/birds/train").mkdir(parents=True)
    (project / "data/birds/train/1.png").write_text("")
    (project / ".gitignore").write_text("data/\n")
    subprocess.run(["git", "init", "-q", project], check=True)
    run = write_run(tmp_path / "run", project, "data/birds/train")
    _, match = conclude(from_run(run), load_all()).matches[0]
    assert f"the folder {project}/data/birds/train was not sent" in match.cause
    assert f"`--data {project}/data/birds/train` before the script" in match.remedy

    plan = json.loads((run / "plan.json").read_text())
    plan["entry"] = {"args": ["--root=data/birds"]}
    (run / "plan.json").write_text(json.dumps(plan))
    _, match = conclude(from_run(run), load_all()).matches[0]
    assert f"`--data {project}/data/birds` before the script" in match.remedy


def write_run_in_checkouts(folder: Path, error: str, *ranks: int, typed_in: str = "") -> Path:
    """Writes a run on three hosts with their own checkouts, in which these ranks had an error."""
    events = [{"event": "rank started", "host": f"n{rank}", "rank": rank, "pid": 7}
              for rank in range(3)]  # fmt: skip
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in events))
    (folder / "result.json").write_text('{"exit_code": 1}')
    nodes = [
        {"host": f"n{rank}", "workdir": f"/w{rank}", "code": "verified equal"} for rank in range(3)
    ]
    plan = {
        "nodes": nodes,
        "typed": {"folder": typed_in},
        "entry": {"kind": "script", "target": "train/main.py"},
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    for rank in range(3):
        (folder / f"logs/n{rank}").mkdir(parents=True, exist_ok=True)
        text = f"{error}\n" if rank in ranks else "ready\n"
        (folder / f"logs/n{rank}/{rank}.log").write_text(text)
    return folder


def test_file_missing_in_checkout_is_copied_from_host_of_rank_0(tmp_path: Path) -> None:
    def remedy(path: str, *ranks: int) -> str:
        error = f"FileNotFoundError: [Errno 2] No such file or directory: '{path}'"
        run = write_run_in_checkouts(tmp_path, error, *ranks)
        rule, match = conclude(from_run(run), load_all()).matches[0]
        assert rule.code == "missing-file"
        return match.remedy

    assert "it is n0:/w0/out/a.pt. Copy it to the same place below /w2" in remedy("out/a.pt", 2)
    assert "it is n0:/w0/out/a.pt." in remedy("/w2/out/a.pt", 2)
    assert not remedy("/elsewhere/a.pt", 2)
    assert not remedy("out/a.pt", 0, 1, 2)


@pytest.mark.parametrize(
    ("module", "file"),
    [("fast.kernels", "train/fast/kernels.py"), ("PIL", ""), ("a" * 300, "")],
)
def test_only_module_of_project_is_missing_in_checkout(
    tmp_path: Path, module: str, file: str
) -> None:
    project = tmp_path / "project"
    (project / "train/fast").mkdir(parents=True)
    (project / "train/fast/kernels.py").touch()
    error = f"ModuleNotFoundError: No module named '{module}'"
    run = write_run_in_checkouts(tmp_path, error, 2, typed_in=str(project))
    rule, match = conclude(from_run(run), load_all()).matches[0]
    assert rule.code == "missing-module"
    if file:
        assert f"there is no {file} in the checkout of the project on n2" in match.cause
        assert f"it is n0:/w0/{file}." in match.remedy
    else:
        assert match.cause == f"rank 2 on n2: Python has no module {module}"
        assert not match.remedy


def test_module_with_long_name_is_looked_up(tmp_path: Path) -> None:
    error = f"ModuleNotFoundError: No module named '{'a' * 300}'"
    run = write_run(tmp_path / "run", tmp_path, "", error)
    _, match = conclude(from_run(run), load_all()).matches[0]
    assert match.cause.endswith(f"Python has no module {'a' * 300}")
