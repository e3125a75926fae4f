"""Which files are the job's code."""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from paceline.agent.files import safe_paths
from paceline.launch.nodes import survey
from paceline.launch.planning import placement
from paceline.launch.planning.placement import Supplies, code_notes
from paceline.launch.planning.request import Request
from paceline.remote.transport import Transport
from paceline.spec.errors import SettingError
from paceline.spec.hosts import Host
from paceline.spec.job import Entry, Job
from paceline.spec.plan import Copy
from paceline.spec.settings import Setting
from paceline.transfer import tree as code


def files(root: Path) -> set[str]:
    return {str(entry[0]) for entry in code.read_tree(root).manifest}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.py", "pack/b.py", "pack/__pycache__/b.pyc", ".venv/x.py", "venv/pyvenv.cfg",
                 "venv/lib/y.py", "runs/1/plan.json", ".hidden/c.py", "data/d.bin"):  # fmt: skip
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return tmp_path


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)


def test_plain_folders_without_what_is_nobodys_code(folder: Path) -> None:
    assert files(folder) == {"a.py", "pack/b.py", "data/d.bin"}


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("mark", [(".paceline-key",), (".paceline-probe",),
                                  ("events.jsonl", "result.json")])  # fmt: skip
def test_run_directories_are_no_code(folder: Path, tracked: bool, mark: tuple[str, ...]) -> None:
    """They change while they are read: the key is written after the code was hashed."""
    inner = folder / "pack" / "my-run"
    (inner / "logs").mkdir(parents=True)
    for name in (*mark, "logs/0.log"):
        (inner / name).write_text("")
    if tracked:
        git(folder, "init", "-q")
    assert not any("my-run" in path for path in files(folder))
    assert "pack/b.py" in files(folder)


@pytest.mark.parametrize("tracked", [False, True])
def test_code_beside_what_a_run_left_is_code(folder: Path, tracked: bool) -> None:
    """With --run-dir exp1, exp1/train.py is still there for the second start."""
    inner = folder / "exp1"
    (inner / "model").mkdir(parents=True)
    for name in ("events.jsonl", "result.json", "model/model.safetensors", "train.py",
                 "model/net.py"):  # fmt: skip
        (inner / name).write_text("")
    if tracked:
        git(folder, "init", "-q")
    assert {path for path in files(folder) if path.startswith("exp1/")} == {
        "exp1/train.py",
        "exp1/model/net.py",
    }


def test_folders_that_may_not_be_looked_into(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    assert files(folder) >= {"a.py", "pack/b.py", "data/d.bin"}


def test_git_says_what_belongs_to_it(folder: Path) -> None:
    git(folder, "init", "-q")
    (folder / ".gitignore").write_text("data/\nvenv/\n.venv/\n__pycache__/\nruns/\n")
    git(folder, "add", "a.py")
    (folder / "gone.py").write_text("x")
    git(folder, "add", "gone.py")
    (folder / "gone.py").unlink()  # tracked, but not there
    assert files(folder) == {"a.py", "pack/b.py", ".gitignore", ".hidden/c.py"}


def test_a_repository_that_git_does_not_read_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not code.read_tree(folder).repository_problem
    git(folder, "init", "-q")
    assert not code.read_tree(folder / "pack").repository_problem
    with monkeypatch.context() as patch:
        patch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
        tree = code.read_tree(folder / "pack")
        assert f"git config --global --add safe.directory {folder}" in tree.repository_problem
        (note,) = code_notes(job(folder), Supplies(tree))
        assert note.endswith(f"The code is all visible files in {folder}/pack")
        patch.setattr(code, "MAX_BYTES", 1)
        with pytest.raises(code.CodeTooLarge) as caught:
            code.read_tree(folder / "pack")
        assert "safe.directory" in caught.value.found
        assert "git init" not in (caught.value.remedy or "")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "git is not installed" in code.read_tree(folder).repository_problem


def test_repositories_in_a_repository_belong_to_it(folder: Path) -> None:
    """Submodules, and clones that git knows nothing of; git lists no more than their folders."""
    for repository in (folder, folder / "pack", folder / "pack/inner", folder / "data"):
        repository.mkdir(exist_ok=True)
        git(repository, "init", "-q")
        (repository / ".gitignore").write_text("*.bin\n__pycache__/\nvenv/\n.venv/\nruns/\n")
    (folder / "pack/inner/d.py").write_text("x")
    git(folder / "pack", "add", "b.py")
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    git(folder / "pack", *author, "commit", "-qm", "x")
    git(folder, "add", "pack")  # as a submodule
    (folder / "link").symlink_to("pack")
    found = files(folder)
    assert found >= {"a.py", "pack/b.py", "pack/inner/d.py", "data/.gitignore"}
    assert not {"data/d.bin", "link/b.py"} & found
    assert "data/.gitignore" not in {*code.files_of(folder, folder / "data")}
    shutil.rmtree(folder / "pack")
    (folder / "pack").mkdir()  # as a clone without --recurse-submodules leaves it
    assert code.read_tree(folder).empty_submodules == ["pack"]


@pytest.mark.parametrize("tracked", [False, True])
def test_links_to_folders_are_named(folder: Path, tmp_path_factory: pytest.TempPathFactory,
                                    tracked: bool) -> None:  # fmt: skip
    outside = tmp_path_factory.mktemp("outside")
    links = {"inner": "pack", "pack/outer": str(outside), "file": "a.py", "broken": "gone"}
    for name, target in {**links, "runs2": "runs", "photos": str(outside)}.items():
        (folder / name).symlink_to(target)
    (folder / ".env").symlink_to("venv")
    if tracked:
        git(folder, "init", "-q")
    tree = code.read_tree(folder)
    assert {*tree.linked_folders} == {"inner", "pack/outer", "runs2", "photos"}
    assert "file" in {entry[0] for entry in tree.manifest}
    with_data = code.read_tree(folder, data=outside)
    assert {*with_data.linked_folders} == {"inner", "runs2"}


def test_a_forged_index_does_not_lead_in_circles(folder: Path) -> None:
    git(folder, "init", "-q")
    git(folder, "add", "a.py", "pack/b.py")
    index = folder / ".git/index"
    content = index.read_bytes()[:-20].replace(b"a.py", b"./.\0")
    index.write_bytes(content + hashlib.sha1(content).digest())
    assert "pack/b.py" in files(folder)


def test_the_same_files_have_the_same_hash(folder: Path) -> None:
    before = code.read_tree(folder)
    os.utime(folder / "a.py", (1, 1))
    assert code.read_tree(folder).manifest == before.manifest
    (folder / "a.py").write_text("other")
    assert code.read_tree(folder).manifest != before.manifest
    (folder / "a.py").write_text("a.py")
    (folder / "a.py").chmod(0o755)
    assert code.read_tree(folder).manifest != before.manifest
    assert before.size == sum(len(name) for name in ("a.py", "pack/b.py", "data/d.bin"))


def test_names_that_are_no_text(folder: Path) -> None:
    name = os.fsdecode(b"\xe9\n '.txt")
    (folder / name).write_text("x")
    assert name in files(folder)
    git(folder, "init", "-q")
    assert name in files(folder)


@pytest.mark.parametrize("limit", ["MAX_FILES", "MAX_BYTES"])
def test_too_much_to_ship(folder: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    (folder / "data").mkdir(exist_ok=True)
    for number in range(9):
        (folder / f"data/{number}.bin").write_bytes(b"12345678")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(code, limit, 2)
    with pytest.raises(SettingError) as caught:
        code.read_tree(folder)
    assert str(folder) in caught.value.message
    assert "most of it is data: 10 files" in caught.value.found
    assert "--ship never" in caught.value.remedy
    assert "keep data out, run `git init` and add it to .gitignore; if" in caught.value.remedy
    git(folder, "init", "-q")
    with pytest.raises(SettingError, match=r"keep data out, add it to .gitignore; "):
        code.read_tree(folder)
    git(folder, "add", ".")
    with pytest.raises(SettingError, match="run `git rm -r -q --cached data` and add it to"):
        code.read_tree(folder)


def test_home_is_no_project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "MAX_FILES", 1)
    monkeypatch.setenv("HOME", str(folder))
    with pytest.raises(SettingError) as caught:
        code.read_tree(folder)
    assert caught.value.remedy == "Start from a folder that holds only the code"


def test_largest_part_holds_no_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who types the remedy keeps the script."""
    (folder / "pack/inner").mkdir()
    (folder / "pack/inner/huge.bin").write_bytes(b"12345678" * 100)
    monkeypatch.setattr(code, "MAX_BYTES", 100)
    monkeypatch.chdir(folder / "pack")
    with pytest.raises(SettingError, match="--data inner sends it once"):
        code.read_tree(folder)
    (folder / "pack/inner/more.py").write_text("")
    with pytest.raises(SettingError, match=r"keep pack/inner/huge.bin out, .*gitignore. Or"):
        code.read_tree(folder)


@pytest.mark.parametrize(
    ("paths", "part"),
    [
        ([*(f"data/{i}.jpg" for i in range(90)), "data/loader.py"], "data"),
        ([f"pkg/m{i}.py" for i in range(60)], "pkg"),
        ([*(f"{i}.jpg" for i in range(90)), "train.py"], ""),
    ],
)
def test_one_of_many_small_files_is_not_the_largest_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: list[str], part: str
) -> None:
    for path in paths:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    monkeypatch.setattr(code, "MAX_FILES", 50)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError) as caught:
        code.read_tree(tmp_path)
    assert f"keep {part or 'some of them'} out, run `git init` and add " in caught.value.remedy
    assert (f"most of it is {part}: " in caught.value.found) == bool(part)


@pytest.mark.parametrize("tracked", [False, True])
def test_data_in_the_project_is_no_code(folder: Path, tracked: bool) -> None:
    if tracked:
        git(folder, "init", "-q")
        git(folder, "add", ".")
    (folder / "data.py").write_text("")
    read = code.read_tree(folder, data=folder / "data")
    assert {"a.py", "pack/b.py", "data.py"} <= {str(entry[0]) for entry in read.manifest}
    assert not any(str(entry[0]).startswith("data/") for entry in read.manifest)
    for data in (folder, folder.parent):
        assert code.read_tree(folder, data=data).manifest == code.read_tree(folder).manifest


def test_code_that_is_too_large_is_not_compared(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "MAX_FILES", 2)
    request = Request(job(folder), (Host("n1"),), cast(Transport, None))
    with pytest.raises(SettingError, match="too large"):
        survey.read_supplies(request)
    never = replace(request.job, ship=Setting("never"))
    supplies = survey.read_supplies(replace(request, job=never))
    assert supplies.code == code.Tree(folder, [])


def test_files_that_vanish_are_no_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those below /proc; the listing of a folder ends when it is clearly too large."""
    real = code.files_of

    def listed(root: Path, data: Path | None, *_: list[str]) -> Iterator[str]:
        yield "gone.py"
        yield from real(root, data)

    monkeypatch.setattr(code, "files_of", listed)
    assert "gone.py" not in files(folder)
    monkeypatch.setattr(code, "MAX_FILES", 1)
    monkeypatch.setattr(code, "MAX_LISTED_FILES", 1)
    with pytest.raises(SettingError) as caught:
        code.read_tree(folder)
    assert caught.value.found.startswith("more than 2 files, ")


def job(folder: Path, target: str = "a.py") -> Job:
    return Job("t", Entry("script", target), str(folder), "/py")


def test_programs_that_need_the_project(folder: Path) -> None:
    def needs_code(target: str, *args: str) -> bool:
        return code.names_code(replace(job(folder), entry=Entry("binary", target, args)))

    assert needs_code("./a.py")
    assert needs_code(f"{folder}/a.py")
    assert needs_code("bash", "a.py")
    assert needs_code("sh", "-c", "cd . && python a.py --lr 1")
    assert not needs_code("hostname")
    assert not needs_code("a.py")  # on the PATH
    assert not needs_code("cat", "/etc/hostname", "none.py", "x" * 5000)
    program = code.entry_at(Entry("binary", f"{folder}/a.py"), str(folder), folder, "/tmp/x")
    assert program.target == "/tmp/x/a.py"


def test_the_root_of_a_project(folder: Path) -> None:
    assert code.project_root(job(folder / "pack", "b.py")) == folder / "pack"
    git(folder, "init", "-q")
    assert code.project_root(job(folder / "pack", "b.py")) == folder


@pytest.mark.parametrize(
    ("path", "there"),
    [("/home/me/p/a.py", "/tmp/x/a.py"), ("/home/me/p", "/tmp/x"), ("/data/d", "/data/d")],
)
def test_paths_on_a_node(path: str, there: str) -> None:
    assert code.relocate(path, Path("/home/me/p"), "/tmp/x") == there


@pytest.mark.parametrize(
    ("path", "fine"),
    [
        ("a/b.txt", True),
        ("a..b", True),
        ("/etc/passwd", False),
        ("../x", False),
        ("a/../../b", False),
    ],
)
def test_a_node_does_not_choose_where_results_go(path: str, fine: bool) -> None:
    if fine:
        assert safe_paths.split_path(path) == path.split("/")
        return
    with pytest.raises(ValueError, match="not a path inside a folder"):
        safe_paths.split_path(path)


def test_inputs_are_renamed_in_the_arguments() -> None:
    entry = Entry("script", "t.py", ("--data", "/here/d", "x"))
    copies = [Copy("code", "x", "/there/code"), Copy("input0", "/here/d", "/there/0")]
    assert placement.with_inputs(entry, copies).args == ("--data", "/there/0", "x")


def imports_of(path: Path) -> set[str]:
    """What of the package a file of it imports when it runs, by the names at its top."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.ImportFrom) and node.module:
            found.update(name for name in [node.module] if not node.level)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return {name.split(".")[1] for name in found if name.startswith("paceline.")}


def test_what_nodes_get_of_this_package_is_what_recipes_need() -> None:
    """And no more: not the report's charts, nor anything else that only the launcher runs."""
    tree = survey.package_tree(survey.OF_RECIPES)
    sent = {Path(str(entry[0])).relative_to("paceline").as_posix() for entry in tree.manifest}
    needed = {name for file in sent if file.endswith(".py")
              for name in imports_of(tree.root / "paceline" / file)}  # fmt: skip
    assert needed <= {Path(part).parts[0].removesuffix(".py") for part in survey.OF_RECIPES}
    of_agent = {part for part in survey.OF_RECIPES if part.startswith("agent/")}
    assert {file for file in sent if file.startswith("agent/")} == of_agent
    assert {"__init__.py", "py.typed", "train/__init__.py", "recipes/image.py"} <= sent
    assert not any(file.startswith(("report/", "lab/", "cli/", "launch/")) for file in sent)
    assert tree.size < 2 << 20
