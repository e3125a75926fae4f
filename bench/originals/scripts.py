"""The published scripts that are run beside the recipes, and what is typed for each.

Nothing of them is kept here: ``compare.py`` reads them from checkouts. What a script needs to run
on a CPU at all is changed in its copy, and stands here word by word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Line = tuple[float, str]
"""Seconds since the start, and a line that was printed."""


@dataclass(frozen=True)
class Script:
    """A published script with its counterpart here.

    Attributes:
        source: Repository and commit.
        path: Of the script, below the folder of checkouts.
        command: Before its own arguments: ``python`` or ``torchrun …``.
        arguments: Its arguments; ``{data}`` stands for the folder of data.
        changes: What is replaced in the copy, and by what.
        figure: What is compared.
        read: The figure from the lines, or ``None`` before the first.
        ours: Arguments of ``paceline``.
        reaches: Whether the figure is one that a training reaches, and not a rate.
        stubs: Modules of vendors' extensions, which are empty here.
    """

    source: str
    path: str
    arguments: tuple[str, ...]
    figure: str
    read: Callable[[Sequence[Line]], float | None]
    ours: tuple[str, ...]
    reaches: bool = True
    command: tuple[str, ...] = ("python",)
    changes: tuple[tuple[str, str], ...] = ()
    stubs: tuple[str, ...] = ()


def last_number(pattern: str) -> Callable[[Sequence[Line]], float | None]:
    """Reads the first group of the last line that matches."""
    compiled = re.compile(pattern)

    def read(lines: Sequence[Line]) -> float | None:
        found = [match[1] for _, line in lines if (match := compiled.search(line))]
        return float(found[-1]) if found else None

    return read


def bleu(lines: Sequence[Line]) -> float | None:
    """BLEU of the last translations that were printed, as many as in one validation."""
    import sacrebleu

    said = {
        word: [line.partition(f"{word}: ")[2] for _, line in lines if f" {word}: " in f" {line}"]
        for word in ("TARGET", "PREDICTED")
    }
    outputs, expected = said["PREDICTED"][-SENTENCES:], said["TARGET"][-SENTENCES:]
    return float(sacrebleu.corpus_bleu(outputs, [expected]).score) if outputs else None


SENTENCES = 100
SIZES = ("--d-model=128", "--layers=6", "--heads=8", "--ff=2048", "--seq-len=40")
SCRIPTS = {
    "container-mnist": Script(
        source="intel/ai-containers, commit 98bb5b16",
        path="pytorch_mnist.py",
        arguments=("--epochs", "1"),
        figure="accuracy",
        read=last_number(r"accuracy=([\d.]+)"),
        ours=("train", "image", "--data=fashion-mnist", "--epochs=1"),
        stubs=("oneccl_bindings_for_pytorch",),
    ),
    "slurm-cifar10": Script(
        source="clemsonciti/palmetto-examples, commit a629f64",
        path="palmetto-examples/PyTorch/Slurm/distributed_data_parallel/train.py",
        arguments=("--epochs", "1"),
        figure="accuracy",
        read=last_number(r"accuracy +([\d.]+)"),
        ours=(
            *("train", "image", "--data=cifar10", "--data-dir={data}/cifar-10-batches-bin"),
            "--epochs=1",
        ),
        changes=(
            ("local_rank = int(os.getenv('LOCAL_RANK', 0))", "local_rank = 'cpu'"),
            ("download=is_main", "download=False"),
            ("        download=True", "        train=False"),  # it tests on the training images
            ("accuracy: .2f", "accuracy: .4f"),
        ),
    ),
    "transformer": Script(
        source="hkproj/pytorch-transformer-distributed, commit f73abd3",
        path="pytorch-transformer-distributed/train.py",
        command=("torchrun", "--nproc_per_node=2"),
        arguments=(
            *("--batch_size", "8", "--num_epochs", "3", "--d_model", "128", "--seq_len", "40"),
            *("--lang_src", "en", "--lang_tgt", "de", "--preload", ""),
        ),
        figure="BLEU",
        read=bleu,
        ours=(
            *("train", "translation", "--data={data}/pairs.tsv", "--epochs=3", *SIZES),
            *("--nproc-per-node=2", "--samples=0"),
        ),
        changes=(
            ('assert torch.cuda.is_available(), "Training on CPU is not supported"', ""),
            ('torch.device("cuda")', 'torch.device("cpu")'),
            ("torch.cuda.set_device(config.local_rank)", ""),
            ("backend='nccl'", "backend='gloo'"),
            ("model, device_ids=[config.local_rank]", "model"),
            ("num_examples: int = 2", f"num_examples: int = {SENTENCES}"),
            ("load_dataset('opus_books'", "load_dataset('{data}/opus_books'"),
        ),
    ),
    "imagenet": Script(
        source="pytorch/examples, commit 77f55b9",
        path="examples/imagenet/main.py",
        arguments=("-a", "resnet50", "--dummy", "-b", "32", "-p", "1", "-j", "0"),
        figure="images/s",
        read=lambda lines: per_second(lines, 32, 16),
        reaches=False,
        ours=(
            *("train", "image", "--data=dummy", "--preset=imagenet-example"),
            *("--model=resnet50", "--global-batch=32", "--steps=16", "--log-every=8"),
        ),
    ),
}


def per_second(lines: Sequence[Line], batch: int, steps: int) -> float | None:
    """Images a second of the second half of so many steps, by the times of the lines."""
    at = [seconds for seconds, line in lines if line.startswith("Epoch: [0]")][: steps + 1]
    half = len(at) // 2
    return batch * (len(at) - 1 - half) / (at[-1] - at[half]) if len(at) > steps else None
