"""Tests unmodified scripts of other launchers, and each command of the migration guide."""

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
    """Writes the data set's six files with two pictures each."""
    folder.mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        rows = (bytes([label]) + bytes([20 * label]) * 3072 for label in (3, 9))
        (folder / f"{name}.bin").write_bytes(b"".join(rows))


def resnet(folder: Path) -> None:
    """Saves a tiny model in the published format, in a folder that is found by the published id."""
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


def test_script_with_custom_store_address(site: Site) -> None:
    """The script opens the store itself; it hangs if told that the launcher holds one."""
    address = f"tcp://{site.lab.address('n1')}:23457"
    guide_command = f"exec {sys.executable} main.py --dist-url {address} --dist-backend gloo"
    guide_command += " --multiprocessing-distributed --world-size 2 --rank $RANK data"
    transport = Transport(site, ("-H", "n1,n2", "-p", "1"))
    ended = transport.run("--no-python", "sh", "-c", guide_command)
    assert ended.code == 0, ended.err
    lines = sorted(line.split("] ", 1)[1] for line in ended.out.splitlines())
    assert lines == [f"spawned {rank} of 4" for rank in range(4)]


# --- the guide


def commands() -> list[str]:
    """Returns every paceline command in the guide's console blocks."""
    text = GUIDE.read_text(encoding="utf-8") if GUIDE.exists() else ""
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [line[2:] for line in joined.splitlines() if line.startswith("$ paceline")]


def trained_as(size: int) -> list[str]:
    """Returns the lines that the script for torchrun prints."""
    return [f"trained as {rank} of {size}" for rank in range(size)]


HOSTNAMES = ["[n1/0] n1", "[n2/1] n2"]
SAYS = {  # start of a command → texts in its output
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
# options that shorten the trainings; nothing else is changed
EXTRA_ARGUMENTS = {"paceline train ": ["--steps", "1"]}
TRAIN_COMMAND = next(text for text in commands() if "--run-dir output" in text)
SCALING_COMMAND = next(text for text in commands() if "bench scaling" in text)


IMAGENET_COMMAND = next(text for text in commands() if " main.py " in text)


@pytest.mark.parametrize(
    "text", [t for t in commands() if t not in (SCALING_COMMAND, IMAGENET_COMMAND)]
)
def test_guide_commands_run(cluster: tuple[Site, Slurm], text: str) -> None:
    """Typed on the first host, in a folder with the guide's scripts."""
    if text.endswith(" output") and not (cluster[0].project / "output").exists():
        guide_command(cluster, TRAIN_COMMAND)
    result = guide_command(cluster, text)
    assert [w for w in SAYS[matching_prefix(text)] if w not in result.stdout] == [], result.stdout


def matching_prefix(text: str) -> str:
    """Returns the longest prefix in ``SAYS`` that matches a command."""
    return max((start for start in SAYS if text.startswith(start)), key=len, default="")


def guide_command(cluster: tuple[Site, Slurm], text: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of the guide, which must succeed."""
    site, slurm = cluster
    extra = next(
        (arguments for start, arguments in EXTRA_ARGUMENTS.items() if text.startswith(start)), []
    )
    arguments = [sys.executable, "-m", *shlex.split(text), *extra]
    env = variables(slurm)
    if re.match("paceline (run|train) -(H|p) ", text) and "--via" not in text:  # others reject it
        env["PACELINE_OPT_KEEP_WARM"] = "2m"  # hosts import torch once, not once per command
    result = site.lab.exec("n1", arguments, env=env, cwd=site.project, timeout=200)
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-3000:]}"
    return result


def test_published_imagenet_command(cluster: tuple[Site, Slurm]) -> None:
    """On CPUs, the published script trains a separate model on each node, and the run says so."""
    folder, result = run_imagenet_command(cluster, fetched(IMAGENET), "--workers", "0")
    assert result.stdout.count("=> creating model 'resnet50'") == 2, result.stdout
    assert result.stdout.count("*   Acc@1 ") == 2, result.stdout
    assert (folder / "checkpoint.pth.tar").exists()
    assert SEPARATE_MODELS in result.stderr


def test_simplified_imagenet_command(cluster: tuple[Site, Slurm]) -> None:
    """Paceline starts one process per node, which spawns its ranks; they use the launcher's store.

    Like the published script on CPUs, it does not wrap its model.
    """
    _, result = run_imagenet_command(cluster, SCRIPTS / "main.py")
    assert [f"spawned {rank} of 4" in result.stdout for rank in range(4)] == [True] * 4
    assert SEPARATE_MODELS in result.stderr


def run_imagenet_command(
    cluster: tuple[Site, Slurm], script: Path, *extra: str
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Runs the guide's command with the unmodified script, for one epoch instead of 90."""
    site, slurm = cluster
    folder = site.project.parent / f"imagenet-{script.parent.name}"
    pictures(folder / "data")
    shutil.copy(script, folder)
    shutil.copy(site.project / "hostfile", folder)
    env = variables(slurm)
    libraries = TORCHVISION if script == IMAGENET else ()  # every Python would import them
    env["PYTHONPATH"] = ":".join(map(str, (env["PYTHONPATH"], *libraries)))
    arguments = [sys.executable, "-m", *shlex.split(IMAGENET_COMMAND), "--epochs", "1", *extra]
    # the two hosts share the machine's CPUs
    arguments[4:4] = ["--env", "PYTHONPATH", "--env", "OMP_NUM_THREADS=1"]
    result = site.lab.exec("n1", arguments, env=env, cwd=folder, timeout=190)
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-3000:]}"
    return folder, result


def pictures(folder: Path) -> None:
    """Writes two classes of two images each, for training and for evaluation."""
    from PIL import Image

    for part, label, number in itertools.product(("train", "val"), ("cat", "dog"), range(2)):
        class_folder = folder / part / label
        class_folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), (90 * number, 9, 99)).save(class_folder / f"{number}.jpg")


def test_expected_output_covers_guide() -> None:
    covered_separately = {SCALING_COMMAND, IMAGENET_COMMAND}
    assert {
        matching_prefix(text) for text in commands() if text not in covered_separately
    } == SAYS.keys()


def variables(slurm: Slurm) -> dict[str, str]:
    folder = Path(sys.executable).parent
    return {**slurm.env, **OURS, "PATH": f"{folder}:{os.environ['PATH']}"}


def test_scaling_times_match_wall_clock(cluster: tuple[Site, Slurm]) -> None:
    """Compares the reported times with times at which the command prints that it begins a run."""
    site, slurm = cluster
    arguments = SCALING_COMMAND.replace(" scaling ", " scaling --out ladder ")
    argv = [sys.executable, "-m", *shlex.split(arguments)]
    child = site.lab.popen("n1", argv, env=variables(slurm), cwd=site.project, text=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip
    with child:
        assert child.stderr is not None
        start_times = [time.monotonic() for line in child.stderr if ", run 1 of 1" in line]
        start_times.append(time.monotonic())
    assert child.returncode == 0
    layouts = json.loads((site.project / "ladder" / "scaling.json").read_text())
    assert [(row["nodes"], row["processes"]) for row in layouts] == [(1, 1), (1, 2)]
    for row, (run_start, ended) in zip(layouts, itertools.pairwise(start_times), strict=True):
        (run,) = row["runs"]
        parts = run["startup"] + run["training"] + run["shutdown"]
        assert parts == pytest.approx(run["wall"], rel=0.001)
        # reading the line takes a moment, on a busy machine seconds
        assert run["wall"] == pytest.approx(ended - run_start, rel=0.1, abs=3.0)


def test_guide_mentions_original_commands() -> None:
    """The other tests run our commands; the other launchers' commands must all be shown."""
    text = GUIDE.read_text(encoding="utf-8")
    for original in (
        "tlt train", "mpiexec.hydra -ppn 1 -f hostfile hostname", "mpirun -l -ppn 1 -hosts",
        "--multiprocessing-distributed --world-size 2 --rank 0", "torchrun --nproc_per_node=2",
        "time python train.py --epochs 5", "bash helper.sh", "sbatch -N2", "docker run --rm",
        "ssh-keygen -t rsa", "accelerate launch",
    ):  # fmt: skip
        assert original in text, original
