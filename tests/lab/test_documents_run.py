"""The commands of the README and of docs/run.md run as they stand, in the lab.

They run on ``n1``, with ``n2`` reachable by SSH, in a folder with the files that the pages name.
Only the length of trainings is cut.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from documents import PAGES, Shown, in_blocks
from paceline.cluster.lab import Lab, LabOptions

pytestmark = [pytest.mark.lab, pytest.mark.slow]

RUN = "runs/image-20261120-101500"
SHOWN = [s for page in PAGES if page.name in ("README.md", "run.md") for s in in_blocks(page)]
COMMANDS = [s for s in SHOWN if s.words[1] != "lab"]
LAB_COMMANDS = [s for s in SHOWN if s.words[1] == "lab"]

SCRIPT = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""


LOG = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/work/train.py", line 3, in <module>
[rank1]:     import wheels
[rank1]: ModuleNotFoundError: No module named 'wheels'
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, Path]]:
    reason = Lab.available()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("project")
    with Lab(LabOptions(hosts=2, share=(str(folder),))) as lab:
        ssh = lab.home("n1") / ".ssh"
        ssh.mkdir(exist_ok=True, mode=0o700)
        shutil.copy(lab.ssh_config, ssh / "config")
        furnish(folder)
        typed(lab, folder, ["train", "image", "--steps", "2", "--run-dir", RUN])
        yield lab, folder


def furnish(folder: Path) -> None:
    """The files that the pages speak of."""
    from PIL import Image

    (folder / "train.py").write_text(SCRIPT)
    (folder / "script.py").write_text("print('hello')\n")
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "train.py").write_text(SCRIPT)
    (folder / "hostfile").write_text("n1\nn2\n")
    for name in ("cats", "dogs"):
        (folder / "my-images" / name).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (16, 16), (40 * number, 9, 99)).save(
                folder / "my-images" / name / f"{number}.png"
            )
    Image.new("L", (8, 8), 7).save(folder / "photo.png")
    (folder / "torchrun.log").write_text(LOG)


def typed(lab: Lab, folder: Path, args: list[str]) -> None:
    command = [sys.executable, "-m", "paceline", *args]
    done = lab.exec("n1", command, cwd=str(folder), timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("shown", COMMANDS, ids=str)
def test_command_runs(shown: Shown, place: tuple[Lab, Path]) -> None:
    lab, folder = place
    cut = ["--steps", "2"] if shown.words[1] == "train" else []
    typed(lab, folder, [*shown.words[1:], *cut])


def test_lab_commands_run(capfd: pytest.CaptureFixture[str]) -> None:
    reason = Lab.available()
    if reason is not None:
        pytest.skip(reason)
    import subprocess

    for shown in LAB_COMMANDS:
        words = list(shown.words[1:])
        if words[:2] == ["lab", "shell"]:
            words += ["--", "hostname"]  # nobody types here
        words[2:2] = ["--name", "documents"]
        done = subprocess.run(
            [sys.executable, "-m", "paceline", *words], capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{shown}: {done.stderr}"
