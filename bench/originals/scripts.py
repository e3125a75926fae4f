"""The published scripts that are compared with the recipes, and the commands of both.

``compare.py`` reads the scripts from checkouts. It applies the changes listed here to a copy; a
script needs them to run on a CPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TimedLine = tuple[float, str]
"""Seconds since the start, and a printed line."""


@dataclass(frozen=True)
class Script:
    """A published script and the corresponding recipe.

    Attributes:
        source: Repository and commit.
        path: Path of the script in the folder of checkouts.
        arguments: Arguments of the script; ``{data}`` stands for the data folder.
        figure: Name of the compared figure.
        read: Returns the figure from the output lines, or ``None`` if there is none yet.
        paceline_arguments: Arguments of ``paceline``.
        is_quality: Whether the figure measures the trained model. Otherwise it is a rate.
        command: Command before the script: ``python`` or ``torchrun …``.
        changes: Replacements in the copy, as pairs of old and new text.
        stubs: Modules of vendors' extensions, which are replaced by empty ones.
    """

    source: str
    path: str
    arguments: tuple[str, ...]
    figure: str
    read: Callable[[Sequence[TimedLine]], float | None]
    paceline_arguments: tuple[str, ...]
    is_quality: bool = True
    command: tuple[str, ...] = ("python",)
    changes: tuple[tuple[str, str], ...] = ()
    stubs: tuple[str, ...] = ()


def find_last_number(pattern: str) -> Callable[[Sequence[TimedLine]], float | None]:
    """A function that reads the first group of the last matching line as a number."""
    compiled = re.compile(pattern)

    def read(lines: Sequence[TimedLine]) -> float | None:
        matches = [match[1] for _, line in lines if (match := compiled.search(line))]
        return float(matches[-1]) if matches else None

    return read


def bleu(lines: Sequence[TimedLine]) -> float | None:
    """BLEU of the last printed translations, as many as in one validation."""
    import sacrebleu

    texts = {
        label: [line.partition(f"{label}: ")[2] for _, line in lines if f" {label}: " in f" {line}"]
        for label in ("TARGET", "PREDICTED")
    }
    outputs, expected = texts["PREDICTED"][-SENTENCES:], texts["TARGET"][-SENTENCES:]
    return float(sacrebleu.corpus_bleu(outputs, [expected]).score) if outputs else None


SENTENCES = 100
SIZES = ("--d-model=128", "--layers=6", "--heads=8", "--ff=2048", "--seq-len=40")
SCRIPTS = {
    "container-mnist": Script(
        source="intel/ai-containers, commit 98bb5b16",
        path="pytorch_mnist.py",
        arguments=("--epochs", "1"),
        figure="accuracy",
        read=find_last_number(r"accuracy=([\d.]+)"),
        paceline_arguments=("train", "image", "--data=fashion-mnist", "--epochs=1"),
        stubs=("oneccl_bindings_for_pytorch",),
    ),
    "slurm-cifar10": Script(
        source="clemsonciti/palmetto-examples, commit a629f64",
        path="palmetto-examples/PyTorch/Slurm/distributed_data_parallel/train.py",
        arguments=("--epochs", "1"),
        figure="accuracy",
        read=find_last_number(r"accuracy +([\d.]+)"),
        paceline_arguments=(
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
        paceline_arguments=(
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
        is_quality=False,
        paceline_arguments=(
            *("train", "image", "--data=dummy", "--preset=imagenet-example"),
            *("--model=resnet50", "--global-batch=32", "--steps=16", "--log-every=8"),
        ),
    ),
}


def per_second(lines: Sequence[TimedLine], batch: int, steps: int) -> float | None:
    """Images per second in the second half of ``steps`` steps, from the times of the lines."""
    times = [seconds for seconds, line in lines if line.startswith("Epoch: [0]")][: steps + 1]
    half = len(times) // 2
    return (
        batch * (len(times) - 1 - half) / (times[-1] - times[half]) if len(times) > steps else None
    )
