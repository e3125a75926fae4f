"""Tests which files belong to the job's code."""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
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


def listed_files(root: Path) -> set[str]:
    return {str(entry[0]) for entry in code.read_tree(root).manifest}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.py", "pack/b.py", "pack/__pycache__/b.pyc", ".venv/x.py", "venv/pyvenv.cfg",
                 "venv/lib/y.py", "runs/1/plan.json", ".hidden/c.py", "data/d.bin"):  # fmt: skip
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True)


def test_omits_environments_runs_and_caches(folder: Path) -> None:
    for name in (".netrc", "pack/.env", ".env", "data/.metadata"):
        (folder / name).write_text("password")
    expected = {"a.py", "pack/b.py", "data/d.bin", "data/.metadata"}  # of a distributed checkpoint
    assert listed_files(folder) == expected
    assert code.read_tree(folder).unsent_env == ".env"


def test_omits_secrets_that_git_does_not_track(folder: Path) -> None:
    git(folder, "init", "-q")
    for name in (".env", ".ssh/id", "pack/.netrc", ".flake8"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("")
    tree = code.read_tree(folder)
    assert {".env", ".ssh/id", "pack/.netrc"}.isdisjoint(str(row[0]) for row in tree.manifest)
    assert ".flake8" in listed_files(folder)
    assert tree.unsent_env == ".env"
    git(folder, "add", ".env", "pack/.netrc")
    assert listed_files(folder) >= {".env", "pack/.netrc"}
    assert ".ssh/id" not in listed_files(folder)


@pytest.mark.parametrize("is_repository", [False, True])
def test_home_folder_is_no_project_of_script_below(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_repository: bool
) -> None:
    link = folder.with_name(f"home-of-{folder.name}")
    link.symlink_to(folder)
    monkeypatch.setenv("HOME", str(link))
    if is_repository:
        git(folder, "init", "-q")

    def root(workdir: Path, script: str) -> Path:
        return code.project_root(Job("a", Entry("script", script), str(workdir), "python3"))

    assert root(folder, "pack/b.py") == root(folder / "pack", "b.py") == folder / "pack"
    assert root(folder, "a.py") == folder


@pytest.mark.parametrize("is_repository", [False, True])
@pytest.mark.parametrize(
    ("entry", "sent"),
    [
        (Entry("script", "a.py", ("--rows", "data/d.bin", ".netrc")), {"data/d.bin"}),
        (Entry("script", "start", ("-c=1",)), {"start"}),
        (Entry("module", "a"), set()),
        (Entry("binary", "bash", ("start",)), {"start"}),
        (Entry("function", "f()", ("{home}",)), set()),
    ],
)
def test_home_folder_is_sent_only_in_part(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_repository: bool, entry: Entry, sent: set[str]
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    for name in ("start", "passwords.txt", ".netrc", ".hidden.py", "other.py"):
        (folder / name).write_text("")
    if is_repository:
        git(folder, "init", "-q")
    if entry.kind == "function":
        entry = replace(entry, args=(str(folder),))
    job = Job("a", entry, str(folder), "python3")
    tree = code.read_code(job)
    assert {str(row[0]) for row in tree.manifest} == {"a.py", "other.py", *sent}
    (note,) = code_notes(job, Supplies(tree))
    assert f"{folder} holds more than one project: only its *.py files" in note
    monkeypatch.setattr(code, "MAX_BYTES", 3)
    with pytest.raises(SettingError, match="too large"):
        code.read_code(job)


def test_project_of_a_function_below_the_home_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    entry = Entry("function", "f()", (str(folder / "pack"),))
    assert code.project_root(Job("a", entry, str(folder), "python3")) == folder / "pack"


def test_folders_that_are_no_projects(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("/", "/home", "/tmp", "~"):
        assert code.is_no_project(Path(path).expanduser())
    assert not code.is_no_project(folder)
    owner = SimpleNamespace(pw_dir=str(folder))
    monkeypatch.setattr("pwd.getpwuid", lambda _uid: owner)  # started with sudo
    assert code.is_no_project(folder)


@pytest.mark.parametrize("repository", [False, True])
def test_omits_new_run_directory_of_another_start(folder: Path, repository: bool) -> None:
    """Another start's first file has a temporary name, and is gone when the code is sent."""
    if repository:
        git(folder, "init", "-q")
    expected = listed_files(folder)
    incoming = folder / "pack" / "my-run" / safe_paths.INCOMING
    incoming.mkdir(parents=True)
    (incoming / "154403d3f939cae9").write_text("")
    assert listed_files(folder) == expected


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("mark", [(".paceline-key",), (".paceline-probe",),
                                  ("events.jsonl", "result.json")])  # fmt: skip
def test_omits_run_directories(folder: Path, tracked: bool, mark: tuple[str, ...]) -> None:
    """Their files change while they are read, for example the key that is written after hashing."""
    inner = folder / "pack" / "my-run"
    (inner / "logs").mkdir(parents=True)
    for name in (*mark, "logs/0.log"):
        (inner / name).write_text("")
    if tracked:
        git(folder, "init", "-q")
    assert not any("my-run" in path for path in listed_files(folder))
    assert "pack/b.py" in listed_files(folder)


@pytest.mark.parametrize("tracked", [False, True])
def test_includes_code_next_to_run_files(folder: Path, tracked: bool) -> None:
    """With --run-dir exp1, the second start must still find exp1/train.py."""
    inner = folder / "exp1"
    (inner / "model").mkdir(parents=True)
    for name in ("events.jsonl", "result.json", "model/model.safetensors", "train.py",
                 "model/net.py"):  # fmt: skip
        (inner / name).write_text("")
    if tracked:
        git(folder, "init", "-q")
    assert {path for path in listed_files(folder) if path.startswith("exp1/")} == {
        "exp1/train.py",
        "exp1/model/net.py",
    }


def test_tolerates_unreadable_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", deny)
    assert listed_files(folder) >= {"a.py", "pack/b.py", "data/d.bin"}


def test_follows_gitignore_and_index(folder: Path) -> None:
    git(folder, "init", "-q")
    (folder / ".gitignore").write_text("data/\nvenv/\n.venv/\n__pycache__/\nruns/\n")
    git(folder, "add", "a.py")
    (folder / "gone.py").write_text("x")
    git(folder, "add", "gone.py")
    (folder / "gone.py").unlink()  # tracked, but deleted
    assert listed_files(folder) == {"a.py", "pack/b.py", ".gitignore", ".hidden/c.py"}


def test_reports_repository_that_git_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_includes_nested_repositories(folder: Path) -> None:
    """Covers submodules, and clones unknown to git, which lists only their folders."""
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
    collected = listed_files(folder)
    assert collected >= {"a.py", "pack/b.py", "pack/inner/d.py", "data/.gitignore"}
    assert not {"data/d.bin", "link/b.py"} & collected
    assert "data/.gitignore" not in {*code.files_of(folder, folder / "data")}
    shutil.rmtree(folder / "pack")
    (folder / "pack").mkdir()  # as in a clone without --recurse-submodules
    assert code.read_tree(folder).empty_submodules == ["pack"]


@pytest.mark.parametrize("tracked", [False, True])
def test_reports_linked_folders(folder: Path, tmp_path_factory: pytest.TempPathFactory,
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


def test_forged_git_index_causes_no_loop(folder: Path) -> None:
    git(folder, "init", "-q")
    git(folder, "add", "a.py", "pack/b.py")
    index = folder / ".git/index"
    content = index.read_bytes()[:-20].replace(b"a.py", b"./.\0")
    index.write_bytes(content + hashlib.sha1(content).digest())
    assert "pack/b.py" in listed_files(folder)


def test_manifest_depends_only_on_content_and_mode(folder: Path) -> None:
    before = code.read_tree(folder)
    os.utime(folder / "a.py", (1, 1))
    assert code.read_tree(folder).manifest == before.manifest
    (folder / "a.py").write_text("other")
    assert code.read_tree(folder).manifest != before.manifest
    (folder / "a.py").write_text("a.py")
    (folder / "a.py").chmod(0o755)
    assert code.read_tree(folder).manifest != before.manifest
    assert before.size == sum(len(name) for name in ("a.py", "pack/b.py", "data/d.bin"))


def test_includes_non_utf8_names(folder: Path) -> None:
    name = os.fsdecode(b"\xe9\n '.txt")
    (folder / name).write_text("x")
    assert name in listed_files(folder)
    git(folder, "init", "-q")
    assert name in listed_files(folder)


@pytest.mark.parametrize("limit", ["MAX_FILES", "MAX_BYTES"])
def test_rejects_oversized_project(
    folder: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
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


def test_remedy_for_home_folder_as_project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "MAX_FILES", 1)
    monkeypatch.setenv("HOME", str(folder))
    with pytest.raises(SettingError) as caught:
        code.read_tree(folder)
    assert caught.value.remedy == "Start from a folder that holds only the code"


def test_remedy_names_largest_part_without_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proposed option must not exclude the script."""
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
def test_remedy_names_folder_of_many_small_files(
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
def test_omits_data_folder_inside_project(folder: Path, tracked: bool) -> None:
    if tracked:
        git(folder, "init", "-q")
        git(folder, "add", ".")
    (folder / "data.py").write_text("")
    read = code.read_tree(folder, data=folder / "data")
    assert {"a.py", "pack/b.py", "data.py"} <= {str(entry[0]) for entry in read.manifest}
    assert not any(str(entry[0]).startswith("data/") for entry in read.manifest)
    for data in (folder, folder.parent):
        assert code.read_tree(folder, data=data).manifest == code.read_tree(folder).manifest


def test_survey_rejects_oversized_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "MAX_FILES", 2)
    request = Request(job(folder), (Host("n1"),), cast(Transport, None))
    with pytest.raises(SettingError, match="too large"):
        survey.read_supplies(request)
    job_without_shipping = replace(request.job, ship=Setting("never"))
    supplies = survey.read_supplies(replace(request, job=job_without_shipping))
    assert supplies.code == code.Tree(folder, [])


@pytest.mark.parametrize(("module", "is_sent"), [("paceline.train?", True), ("torch", False)])
def test_training_library_is_sent_with_scripts_that_import_it(
    folder: Path, module: str, is_sent: bool
) -> None:
    request = Request(replace(job(folder), preload=(module,)), (Host("n1"),), cast(Transport, None))
    assert (survey.read_supplies(request).package is not None) == is_sent


def test_ignores_vanished_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Example: files below /proc. Listing a folder stops when it is clearly too large."""
    list_files = code.files_of

    def list_with_vanished(root: Path, data: Path | None, *_: list[str]) -> Iterator[str]:
        yield "gone.py"
        yield from list_files(root, data)

    monkeypatch.setattr(code, "files_of", list_with_vanished)
    assert "gone.py" not in listed_files(folder)
    monkeypatch.setattr(code, "MAX_FILES", 1)
    monkeypatch.setattr(code, "MAX_LISTED_FILES", 1)
    with pytest.raises(SettingError) as caught:
        code.read_tree(folder)
    assert caught.value.found.startswith("more than 2 files, ")


def job(folder: Path, target: str = "a.py") -> Job:
    return Job("t", Entry("script", target), str(folder), "/py")


def test_detects_programs_that_need_project(folder: Path) -> None:
    def needs_code(target: str, *args: str) -> bool:
        return code.names_code(replace(job(folder), entry=Entry("binary", target, args)))

    assert needs_code("./a.py")
    assert needs_code(f"{folder}/a.py")
    assert needs_code("bash", "a.py")
    assert needs_code("sh", "-c", "cd . && python a.py --lr 1")
    assert not needs_code("hostname")
    assert not needs_code("a.py")  # a command on the PATH
    assert not needs_code("cat", "/etc/hostname", "none.py", "x" * 5000)
    program = code.entry_at(Entry("binary", f"{folder}/a.py"), str(folder), folder, "/tmp/x")
    assert program.target == "/tmp/x/a.py"


def test_project_root(folder: Path) -> None:
    assert code.project_root(job(folder / "pack", "b.py")) == folder / "pack"
    for program, root in (("../a.sh", folder), ("./b.sh", folder / "pack"),
                          ("/bin/sh", folder / "pack"), ("hostname", folder / "pack")):  # fmt: skip
        entry = Entry("binary", program)
        assert code.project_root(Job("a", entry, str(folder / "pack"), "python3")) == root
    git(folder, "init", "-q")
    assert code.project_root(job(folder / "pack", "b.py")) == folder


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/home/me/p/a.py", "/tmp/x/a.py"), ("/home/me/p", "/tmp/x"), ("/data/d", "/data/d")],
)
def test_relocates_paths_to_node(path: str, expected: str) -> None:
    assert code.relocate(path, Path("/home/me/p"), "/tmp/x") == expected


@pytest.mark.parametrize(
    ("path", "is_valid"),
    [
        ("a/b.txt", True),
        ("a..b", True),
        ("/etc/passwd", False),
        ("../x", False),
        ("a/../../b", False),
    ],
)
def test_rejects_path_outside_folder(path: str, is_valid: bool) -> None:
    if is_valid:
        assert safe_paths.split_path(path) == path.split("/")
        return
    with pytest.raises(ValueError, match="not a path inside a folder"):
        safe_paths.split_path(path)


def test_arguments_refer_to_input_copies() -> None:
    entry = Entry("script", "t.py", ("--data", "/here/d", "x"))
    copies = [Copy("code", "x", "/there/code"), Copy("input0", "/here/d", "/there/0")]
    assert placement.with_inputs(entry, copies).args == ("--data", "/there/0", "x")


def imports_of(path: Path) -> set[str]:
    """Returns the modules that a file of the package imports at run time."""
    collected: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.ImportFrom) and node.module:
            collected.update(name for name in [node.module] if not node.level)
        elif isinstance(node, ast.Import):
            collected.update(alias.name for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return {name.split(".")[1] for name in collected if name.startswith("paceline.")}


def test_package_called_runs_is_code(folder: Path) -> None:
    for file in ("runs/a/model.py", "pack/runs/__init__.py", "pack/runs/state.py"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("")
    read = {str(entry[0]) for entry in code.read_tree(folder).manifest}
    assert "pack/runs/state.py" in read
    assert "runs/a/model.py" not in read


def test_package_is_sent_whatever_git_and_names_say(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be in an environment that git ignores, and folders called ``runs`` are part of it."""
    git(folder, "init", "-q")
    (folder / ".gitignore").write_text("venv/\n")
    package = folder / "venv/paceline"
    for file in ("spec/version.py", "cli/runs/state.py", "cli/__pycache__/state.pyc"):
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text("")
    monkeypatch.setattr(survey.version, "__file__", str(package / "spec/version.py"))
    sent = {str(entry[0]) for entry in survey.package_tree(True).manifest}
    assert sent == {"paceline/spec/version.py", "paceline/cli/runs/state.py"}


def test_shipped_package_covers_recipe_imports() -> None:
    """Excludes all that only the launcher needs, such as the charts of the report."""
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
