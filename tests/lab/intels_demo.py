"""Locates the demo of Intel's containers, and provides stand-ins for the libraries it needs."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

from transports import PARTS

HERE = Path(__file__).parent
PUBLISHED = (PARTS / "scripts/intel-ai-containers/preset/deep-learning/demo/pytorch-distributed"
        / "pytorch_mnist.py")  # fmt: skip
STAND_IN = HERE / "coming" / PUBLISHED.name  # initializes like the published script
WORDS = (PUBLISHED.name, "--device", "cpu", "--save-model")
FASHION = Path("/usr/share/datasets/fashion-mnist")
# for PYTHONPATH; the module with the name of oneCCL's bindings uses gloo
LIBRARIES = ":".join(map(str, (HERE / "standins", HERE / "cpu_torchvision", PARTS / "torchvision",
                               PARTS / "frameworks")))  # fmt: skip


def put_into(folder: Path, script: Path) -> None:
    """Copies the script and a few pictures to where the script looks for them."""
    shutil.copy(script, folder)
    few_clothes(folder / "data" / "FashionMNIST" / "raw")


def few_clothes(folder: Path) -> None:
    """Writes the first pictures of Fashion-MNIST in the files that torchvision looks for."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 256), ("t10k", 64)):
        for kind, head, size in (("images-idx3", 16, 784), ("labels-idx1", 8, 1)):
            name = f"{part}-{kind}-ubyte"
            with gzip.open(FASHION / f"{name}.gz") as file:
                whole = file.read(head + count * size)
            (folder / name).write_bytes(whole[:4] + count.to_bytes(4, "big") + whole[8:])
