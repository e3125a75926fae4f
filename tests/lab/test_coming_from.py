"""Scripts written for other launchers run unmodified, and each command of the guide does."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launches import OURS, Site
from slurmlab import Slurm, slurm_on
from transports import PARTS, Transport, fetched, site_in

pytestmark = [pytest.mark.lab, pytest.mark.slow]

SCRIPTS = Path(__file__).with_name("coming")
IMAGENET = PARTS / "scripts" / "pytorch-examples" / "imagenet" / "main.py"
TORCHVISION = (Path(__file__).with_name("cpu_torchvision"), PARTS / "torchvision")
SEPARATE_MODELS = "the ranks exchanged no gradients"
GUIDE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "coming-from.md"


@pytest.fixture(scope="module")
def cluster(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Slurm]]:
    folder = tmp_path_factory.mktemp("coming")
    site = site_in(new_lab, folder)
    shutil.copytree(SCRIPTS, site.project, dirs_exist_ok=True)
    (site.project / "hostfile").write_text("n1\nn2\n")
    cifar10(site.project / "data")
    resnet(site.project / "microsoft" / "resnet-50")
    with slurm_on(site.lab, folder / "slurm") as slurm:
        yield site, slurm


def cifar10(folder: Path) -> None:
    """Two pictures in each of the six files."""
    folder.mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        rows = (bytes([label]) + bytes([20 * label]) * 3072 for label in (3, 9))
        (folder / f"{name}.bin").write_bytes(b"".join(rows))


def resnet(folder: Path) -> None:
    """A tiny one in the form of the published one; a folder of that name answers to the id."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"
    )
    transformers.ResNetForImageClassification(config).save_pretrained(folder)
    size = {"shortest_edge": 224}
    content = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": size, "crop_pct": 0.875}
    (folder / "preprocessor_config.json").write_text(json.dumps(content))


@pytest.fixture
def site(cluster: tuple[Site, Slurm]) -> Site:
    return cluster[0]


def test_a_script_with_an_address_of_its_own(site: Site) -> None:
    """It opens the store itself: under a launcher that says it holds one, it would wait forever."""
    address = f"tcp://{site.lab.address('n1')}:23457"
    typed = f"exec {sys.executable} main.py --dist-url {address} --dist-backend gloo"
    typed += " --multiprocessing-distributed --world-size 2 --rank $RANK data"
    transport = Transport(site, ("-H", "n1,n2", "-p", "1"))
    ended = transport.run("--no-python", "sh", "-c", typed)
    assert ended.code == 0, ended.err
    lines = sorted(line.split("] ", 1)[1] for line in ended.out.splitlines())
    assert lines == [f"spawned {rank} of 4" for rank in range(4)]


# --- the guide


def commands() -> list[str]:
    """Every command of ours in the guide that stands in a block to be run."""
    text = GUIDE.read_text(encoding="utf-8") if GUIDE.exists() else ""
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [line[2:] for line in joined.splitlines() if line.startswith("$ paceline")]


def trained_as(size: int) -> list[str]:
    """What the script for torchrun says."""
    return [f"trained as {rank} of {size}" for rank in range(size)]


HOSTNAMES = ["[n1/0] n1", "[n2/1] n2"]
SAYS = {  # how a command begins → what it says
    "paceline hosts hostfile": ["n1", "n2"],
    "paceline run -H hostfile --no-python hostname": HOSTNAMES,
    "paceline run -H hostfile --via mpi --no-python hostname": HOSTNAMES,
    "paceline run -H n1,n2 --via mpi -p 1 train.py": trained_as(2),
    "paceline train -H hostfile --nnodes 2 --nproc-per-node 2 image": ["accuracy"],
    "paceline evaluate output": ["accuracy"],
    "paceline list models --recipe image": ["pretrained:"],
    "paceline run -p 2 train.py": trained_as(2),
    "paceline run -H hostfile -p 2 train.py": trained_as(4),
    "paceline run --rdzv n1:48123 --rdzv-id 456 --nnodes 1": trained_as(2),
    "paceline setup accelerate -H hostfile -p 2": ["2 machines, 2 processes each"],
    "paceline run -p 1 train.py": trained_as(1),
    "paceline run --via slurm --nnodes 2 --gpus v100:4": trained_as(4),
}
# the length of a training is cut, and nothing else
SHORTER = {"paceline train ": ["--steps", "1"]}
TRAINING = next(text for text in commands() if "--run-dir output" in text)
LADDER = next(text for text in commands() if "bench scaling" in text)


IMAGENET_LINE = next(text for text in commands() if " main.py " in text)


@pytest.mark.parametrize("text", [t for t in commands() if t not in (LADDER, IMAGENET_LINE)])
def test_each_command_of_the_guide(cluster: tuple[Site, Slurm], text: str) -> None:
    """As typed on the first host, in a folder with the scripts that the guide speaks of."""
    if text.endswith(" output") and not (cluster[0].project / "output").exists():
        typed(cluster, TRAINING)
    done = typed(cluster, text)
    assert [w for w in SAYS[says_of(text)] if w not in done.stdout] == [], done.stdout


def says_of(text: str) -> str:
    """The longest beginning in ``SAYS`` that a command has."""
    return max((start for start in SAYS if text.startswith(start)), key=len, default="")


def typed(cluster: tuple[Site, Slurm], text: str) -> subprocess.CompletedProcess[str]:
    """A command of the guide, which ends well."""
    site, slurm = cluster
    more = next((words for start, words in SHORTER.items() if text.startswith(start)), [])
    words = [sys.executable, "-m", *shlex.split(text), *more]
    env = variables(slurm)
    if re.match("paceline (run|train) -(H|p) ", text) and "--via" not in text:  # others refuse it
        env["PACELINE_OPT_KEEP_WARM"] = "2m"  # hosts import torch once, not for each command
    done = site.lab.exec("n1", words, env=env, cwd=site.project, timeout=200)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done


def test_the_imagenet_line(cluster: tuple[Site, Slurm]) -> None:
    """The script as published trains a model for each node on CPUs, and the run says so."""
    folder, done = imagenet_line(cluster, fetched(IMAGENET), "--workers", "0")
    assert done.stdout.count("=> creating model 'resnet50'") == 2, done.stdout
    assert done.stdout.count("*   Acc@1 ") == 2, done.stdout
    assert (folder / "checkpoint.pth.tar").exists()
    assert SEPARATE_MODELS in done.stderr


def test_our_stand_in_for_the_imagenet_line(cluster: tuple[Site, Slurm]) -> None:
    """One start a node, which spawns its ranks; they meet at the address that the launcher holds.

    As the published one on CPUs, it does not wrap its model.
    """
    _, done = imagenet_line(cluster, SCRIPTS / "main.py")
    assert [f"spawned {rank} of 4" in done.stdout for rank in range(4)] == [True] * 4
    assert SEPARATE_MODELS in done.stderr


def imagenet_line(
    cluster: tuple[Site, Slurm], script: Path, *more: str
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """As typed, in a folder with the script, unmodified; its 90 epochs are cut."""
    site, slurm = cluster
    folder = site.project.parent / f"imagenet-{script.parent.name}"
    pictures(folder / "data")
    shutil.copy(script, folder)
    shutil.copy(site.project / "hostfile", folder)
    env = variables(slurm)
    libraries = TORCHVISION if script == IMAGENET else ()  # which every Python there would import
    env["PYTHONPATH"] = ":".join(map(str, (env["PYTHONPATH"], *libraries)))
    words = [sys.executable, "-m", *shlex.split(IMAGENET_LINE), "--epochs", "1", *more]
    # two hosts that share the CPUs, see the lab's page
    words[4:4] = ["--env", "PYTHONPATH", "--env", "OMP_NUM_THREADS=1"]
    done = site.lab.exec("n1", words, env=env, cwd=folder, timeout=190)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return folder, done


def pictures(folder: Path) -> None:
    """Two classes of two images, to train with and to evaluate."""
    from PIL import Image

    for part, label, number in itertools.product(("train", "val"), ("cat", "dog"), range(2)):
        where = folder / part / label
        where.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), (90 * number, 9, 99)).save(where / f"{number}.jpg")


def test_every_line_of_the_guide_has_its_output_checked() -> None:
    typed_elsewhere = {LADDER, IMAGENET_LINE}
    assert {says_of(text) for text in commands() if text not in typed_elsewhere} == SAYS.keys()


def variables(slurm: Slurm) -> dict[str, str]:
    folder = Path(sys.executable).parent
    return {**slurm.env, **OURS, "PATH": f"{folder}:{os.environ['PATH']}"}


def test_the_ladder_agrees_with_a_stopwatch(cluster: tuple[Site, Slurm]) -> None:
    """The guide's command says when it begins each run, and somebody else looks at the clock."""
    site, slurm = cluster
    words = LADDER.replace(" scaling ", " scaling --out ladder ")
    argv = [sys.executable, "-m", *shlex.split(words)]
    child = site.lab.popen("n1", argv, env=variables(slurm), cwd=site.project, text=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip
    with child:
        assert child.stderr is not None
        begun = [time.monotonic() for line in child.stderr if ", run 1 of 1" in line]
        begun.append(time.monotonic())
    assert child.returncode == 0
    layouts = json.loads((site.project / "ladder" / "scaling.json").read_text())
    assert [(row["nodes"], row["processes"]) for row in layouts] == [(1, 1), (1, 2)]
    for row, (began, ended) in zip(layouts, itertools.pairwise(begun), strict=True):
        (run,) = row["runs"]
        parts = run["startup"] + run["training"] + run["shutdown"]
        assert parts == pytest.approx(run["wall"], rel=0.001)
        # a moment passes until the line is read, on a busy machine seconds
        assert run["wall"] == pytest.approx(ended - began, rel=0.1, abs=3.0)


def test_the_guide_speaks_of_every_original_command() -> None:
    """Ours are run above; theirs must all be there."""
    text = GUIDE.read_text(encoding="utf-8")
    for original in (
        "tlt train", "mpiexec.hydra -ppn 1 -f hostfile hostname", "mpirun -l -ppn 1 -hosts",
        "--multiprocessing-distributed --world-size 2 --rank 0", "torchrun --nproc_per_node=2",
        "time python train.py --epochs 5", "bash helper.sh", "sbatch -N2", "docker run --rm",
        "ssh-keygen -t rsa", "accelerate launch",
    ):  # fmt: skip
        assert original in text, original
