"""Tests the package as users get it: a wheel that pip installs into an empty environment.

pip finds the dependencies in a folder of wheels, without network. It installs what the wheel's
metadata requires, without extras. So a module that is imported but not required, or a file that the
wheel lacks, is found here and not by a user. ``tests/lab/test_docker.py`` does the same in a
container.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import paceline
from wheels import REPOSITORY, Distributions, build_distributions, write_wheelhouse

TYPED = Path(__file__).with_name("typed_user.py")


@dataclass(frozen=True)
class Installed:
    """An environment in which the wheel is installed, and an empty folder to work in."""

    distributions: Distributions
    bin: Path
    folder: Path

    def run(self, *argv: str, status: int = 0) -> str:
        """Runs a program of the environment; returns its output."""
        quiet = {"HOME": str(self.folder), "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}
        base = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PACELINE_O"))}
        result = subprocess.run([str(self.bin / argv[0]), *argv[1:]], cwd=self.folder, text=True,
                              capture_output=True, check=False, env={**base, **quiet})  # fmt: skip
        assert result.returncode == status, f"{argv}: {result.stdout}{result.stderr}"
        return result.stdout + result.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("package")
    distributions = build_distributions(folder)
    wheelhouse = folder / "wheelhouse"
    wheelhouse.mkdir()
    write_wheelhouse(distributions.wheel, wheelhouse)
    environment = folder / "environment"
    venv.create(environment, symlinks=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "install",
         "--no-index", "--find-links", str(wheelhouse), str(distributions.wheel)],
        check=True, capture_output=True,
    )  # fmt: skip
    work = folder / "work"
    work.mkdir()
    yield Installed(distributions, environment / "bin", work)
    shutil.rmtree(folder)


def test_twine_accepts_both_distributions(installed: Installed) -> None:
    files = [str(installed.distributions.sdist), str(installed.distributions.wheel)]
    result = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files],
                          check=False, capture_output=True, text=True)  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr


def test_sdist_contains_tracked_files(installed: Installed) -> None:
    with tarfile.open(installed.distributions.sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert _tracked("src", "tests", "docs", "pyproject.toml", "LICENSE", "NOTICE") - packed == set()


def _tracked(*paths: str) -> set[str]:
    """Returns the files that git tracks in this repository and that exist."""
    listed = subprocess.run(["git", "ls-files", *paths], cwd=REPOSITORY, check=True,
                            capture_output=True, text=True).stdout.split("\n")  # fmt: skip
    return {name for name in listed if name and (REPOSITORY / name).exists()}


def test_wheel_contains_package_tree(installed: Installed) -> None:
    with zipfile.ZipFile(installed.distributions.wheel) as archive:
        packed = {f"src/{name}" for name in archive.namelist() if name.startswith("paceline/")}
    assert _tracked("src/paceline") - packed == set()
    assert "src/paceline/py.typed" in packed
    assert not [name for name in packed if "tests" in name.split("/")]


def test_installed_commands_run(installed: Installed) -> None:
    assert f"paceline, version {paceline.__version__}" in installed.run("paceline", "--version")
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


def test_runs_job_without_torch(installed: Installed) -> None:
    (installed.folder / "tell.py").write_text("import os; print('rank', os.environ['RANK'])\n")
    output = installed.run("paceline", "run", "--no-torch", "-p", "2", "tell.py")
    assert "rank 0" in output
    assert "rank 1" in output


def test_train_without_torch_reports_requirement(installed: Installed) -> None:
    output = installed.run("paceline", "train", "image", status=1)
    assert "Traceback" not in output
    assert "torch" in output


def test_installed_package_is_typed(installed: Installed) -> None:
    """A user's module passes mypy with the installed package, not with this repository's source."""
    shutil.copy2(TYPED, installed.folder / "typed_user.py")
    (installed.folder / "tell.py").write_text(
        "import sys\nif sys.argv[1] == 'fail':\n    raise ValueError('fail')\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable",
         str(installed.bin / "python"), "--cache-dir", "cache", "typed_user.py"],
        cwd=installed.folder, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    installed.run("python", "typed_user.py")
