"""The package as users get it: the wheel, in an environment that holds nothing else.

The environment has what the wheel itself asks for, without extras, and nothing more: a module that
is imported and not asked for, or a file that the wheel lacks, is found here and not by a user.
"""

from __future__ import annotations

import importlib.metadata as metadata
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[2]
TYPED = Path(__file__).with_name("typed_user.py")


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and an empty folder to work in."""

    wheel: Path
    bin: Path
    folder: Path

    def run(self, *argv: str, status: int = 0) -> str:
        """Runs a program of the environment; returns what it wrote."""
        quiet = {"HOME": str(self.folder), "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PACELINE_O"))}
        done = subprocess.run([str(self.bin / argv[0]), *argv[1:]], cwd=self.folder, text=True,
                              capture_output=True, check=False, env={**kept, **quiet})  # fmt: skip
        assert done.returncode == status, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("package")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
                   cwd=REPOSITORY, check=True, capture_output=True)  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    home = folder / "environment"
    venv.create(home, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    _copy_needed(site)
    entry = home / "bin" / "paceline"  # what an installer makes of the wheel's entry point
    entry.write_text(f"#!{home}/bin/python\nfrom paceline.cli import main\nmain()\n")
    entry.chmod(0o755)
    work = folder / "work"
    work.mkdir()
    yield Installed(wheel, home / "bin", work)
    shutil.rmtree(folder)


def _copy_needed(site: Path) -> None:
    """Copies what the wheel asks for, and what that asks for in turn, from this environment."""
    (about,) = site.glob("paceline-*.dist-info")
    wanted = list(_requirements(metadata.Distribution.at(about).requires or []))
    copied: set[str] = set()
    while wanted:
        name = wanted.pop().lower()
        if name in copied:
            continue
        copied.add(name)
        found = metadata.distribution(name)
        for file in found.files or []:
            source = Path(str(found.locate_file(file)))
            if ".." not in file.parts and source.suffix != ".pyc":
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, site / file)
        wanted += _requirements(found.requires or [])


def _requirements(lines: Sequence[str]) -> Iterator[str]:
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement.name


def test_the_wheel_holds_the_whole_tree(installed: Installed) -> None:
    listed = subprocess.run(["git", "ls-files", "src/paceline"], cwd=REPOSITORY, check=True,
                            capture_output=True, text=True).stdout.split()  # fmt: skip
    there = {name for name in listed if (REPOSITORY / name).exists()}
    with zipfile.ZipFile(installed.wheel) as archive:
        held = {f"src/{name}" for name in archive.namelist() if name.startswith("paceline/")}
    assert there - held == set()
    assert "src/paceline/py.typed" in held
    assert not [name for name in held if "tests" in name.split("/")]


def test_its_commands_run(installed: Installed) -> None:
    assert "paceline, version" in installed.run("paceline", "--version")
    assert "--hosts" in installed.run("paceline", "run", "--help")
    assert "image" in installed.run("paceline", "list")
    assert "n2" in installed.run("paceline", "hosts", "n1,n2")
    log = installed.folder / "job.log"
    log.write_text(
        "Traceback (most recent call last):\nModuleNotFoundError: No module named 'nt'\n"
    )
    assert "missing-module" in installed.run("paceline", "explain", "--log", "job.log")
    installed.run("paceline", "recipe", "copy", "image")
    assert list(installed.folder.glob("*image*.py"))


def test_a_job_runs_that_needs_no_torch(installed: Installed) -> None:
    (installed.folder / "tell.py").write_text("import os; print('rank', os.environ['RANK'])\n")
    told = installed.run("paceline", "run", "--no-torch", "-p", "2", "tell.py")
    assert "rank 0" in told
    assert "rank 1" in told


def test_what_needs_an_extra_says_which(installed: Installed) -> None:
    told = installed.run("paceline", "train", "image", status=1)
    assert "Traceback" not in told
    assert "torch" in told


def test_its_names_are_typed(installed: Installed) -> None:
    """A user's own module passes mypy against the installed package, not against this tree."""
    shutil.copy2(TYPED, installed.folder / "typed_user.py")
    (installed.folder / "tell.py").write_text(
        "import sys\nif sys.argv[1] == 'fail':\n    raise ValueError('fail')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable",
         str(installed.bin / "python"), "--cache-dir", "cache", "typed_user.py"],
        cwd=installed.folder, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    installed.run("python", "typed_user.py")
