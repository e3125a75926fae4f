"""Compares published scripts with the recipes: figure at equal epochs, and time to that figure.

    python bench/originals/compare.py CHECKOUTS DATA --python PYTHON [--only NAME] [--out FILE]

CHECKOUTS has the repositories named in ``scripts.py`` and the file ``pytorch_mnist.py``. PYTHON is
an interpreter with the scripts' requirements: torchvision (see ``torchvision_alone.py``),
torchmetrics, tensorboardX, datasets, wandb. The script creates missing data in DATA: Fashion-MNIST
from Debian's package, and sentence pairs from the message catalogues of installed packages.
CIFAR-10 is created by ``cifar10.py``.

Script and recipe run one after another with all CPUs of this machine. The recipe runs twice: for as
many epochs as the script, and until its held-out figure reaches the script's, including the time of
the evaluations. The recipe gets the data, epochs and sizes of the script's command; the other
options have their defaults. Times are those of the complete command.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
from catalogues import corpus
from scripts import SCRIPTS, Script, TimedLine

FASHION = Path("/usr/share/datasets/fashion-mnist")
PAIRS = 6000


@dataclass(frozen=True)
class Outcome:
    """Figure that a command reached, and its seconds."""

    figure: float
    seconds: float


def main() -> None:
    options = parser().parse_args()
    make_data(options.data)
    rows = []
    for name in options.only or SCRIPTS:
        rows.append(compare_script(name, SCRIPTS[name], options))
        print(rows[-1], flush=True)
    text = "\n".join([*table_head(), *rows, ""])
    print(text)
    if options.out:
        options.out.write_text(text)


def parser() -> argparse.ArgumentParser:
    formatter = argparse.RawTextHelpFormatter
    arguments_parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    arguments_parser.add_argument("checkouts", type=lambda text: Path(text).resolve())
    arguments_parser.add_argument("data", type=lambda text: Path(text).resolve())
    arguments_parser.add_argument("--python", type=Path, default=Path(sys.executable))
    arguments_parser.add_argument("--only", action="append", choices=SCRIPTS)
    arguments_parser.add_argument("--out", type=Path)
    return arguments_parser


def table_head() -> list[str]:
    return [
        f"{platform.machine()}, {os.cpu_count()} CPUs, all for one command at a time.",
        "",
        "| script | figure | script's | s | recipe's | s | s to the script's figure | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]


def compare_script(name: str, script: Script, options: argparse.Namespace) -> str:
    """Compare a script with the recipe; a row of the table."""
    original = run_script(script, options)
    recipe = run_recipe(script, options.data, ())
    cells = [name, script.figure, f"{original.figure:.4g}", f"{original.seconds:.0f}"]
    cells += [f"{recipe.figure:.4g}", f"{recipe.seconds:.0f}"]
    if script.is_quality:
        same_quality = run_recipe(script, options.data, (f"--stop-at={original.figure}",))
        assert same_quality.figure >= original.figure, same_quality
        cells += [f"{same_quality.seconds:.0f}", f"{same_quality.seconds / original.seconds:.2f}"]
    else:  # a rate: ratio of the times for the same work
        cells += ["", f"{original.figure / recipe.figure:.2f}"]
    return f"| {' | '.join(cells)} |"


def run_script(script: Script, options: argparse.Namespace) -> Outcome:
    with script_copy(script, options) as copy:
        command = [*interpreter_command(script, options.python), copy.name, *script.arguments]
        start = time.monotonic()
        lines = run_timed(command, copy.parent, script)
        figure = script.read(lines)
        assert figure is not None, "\n".join(line for _, line in lines[-20:])
        return Outcome(figure, lines[-1][0] if lines else time.monotonic() - start)


def interpreter_command(script: Script, python: Path) -> list[str]:
    if script.command[0] == "torchrun":
        return [str(python), "-m", "torch.distributed.run", *script.command[1:]]
    return [str(python)]


@contextmanager
def script_copy(script: Script, options: argparse.Namespace) -> Iterator[Path]:
    """Copy the script to a temporary folder and apply its changes. Yields the copy."""
    with tempfile.TemporaryDirectory() as temporary:
        original = options.checkouts / script.path
        folder = Path(temporary)
        for module in original.parent.glob("*.py"):
            shutil.copy(module, folder)
        text = original.read_text()
        for original_text, replacement in script.changes:
            assert original_text in text, original_text
            text = text.replace(original_text, replacement.replace("{data}", str(options.data)))
        copy = folder / original.name
        copy.write_text(text)
        for stub in script.stubs:
            (folder / f"{stub}.py").touch()
        (folder / "data").symlink_to(options.data)
        yield copy


def run_timed(command: Sequence[str], folder: Path, script: Script) -> list[TimedLine]:
    """Run a command and return its output lines with their times. A rate ends the command early."""
    environment = os.environ | {"WANDB_MODE": "offline", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    start, lines = time.monotonic(), list[TimedLine]()
    for line in process.stdout:
        lines.append((time.monotonic() - start, line.rstrip()))
        if not script.is_quality and script.read(lines) is not None:
            os.killpg(process.pid, signal.SIGKILL)
            break
    process.wait()
    lines.append((time.monotonic() - start, ""))
    return lines


def run_recipe(script: Script, data: Path, extra_flags: Sequence[str]) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        flags = [flag.replace("{data}", str(data)) for flag in script.paceline_arguments]
        run = ["--run-dir", folder + "/run", "--checkpoint-every=never", "--resume=never"]
        start = time.monotonic()
        command = [sys.executable, "-m", "paceline", *flags, *run, *extra_flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return Outcome(recipe_figure(Path(folder, "run"), script), time.monotonic() - start)


def recipe_figure(run: Path, script: Script) -> float:
    """Held-out figure of a recipe's run, or its samples per second."""
    if not script.is_quality:
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return float(
            [record for record in records if record["split"] == "train"][-1]["samples_per_s"]
        )
    metrics = json.loads((run / "result.json").read_text())["metrics"]
    return float(metrics[script.figure.lower()])


def make_data(folder: Path) -> None:
    raw = folder / "FashionMNIST/raw"
    raw.mkdir(parents=True, exist_ok=True)
    for packed in FASHION.glob("*.gz"):
        unpacked = raw / packed.stem
        if not unpacked.exists():
            unpacked.write_bytes(gzip.decompress(packed.read_bytes()))
    if not (folder / "pairs.tsv").exists():
        make_pairs(folder)


def make_pairs(folder: Path) -> None:
    """Write a sample of the catalogues as tab-separated lines and in the format of opus_books."""
    all_pairs = corpus("de")
    pairs = all_pairs[:: max(1, len(all_pairs) // PAIRS)][:PAIRS]
    (folder / "pairs.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    books = folder / "opus_books"
    books.mkdir(exist_ok=True)
    rows = (
        json.dumps({"translation": dict(zip(("en", "de"), pair, strict=True))}) for pair in pairs
    )
    (books / "train.jsonl").write_text("\n".join(rows) + "\n")
    metadata = "configs:\n- config_name: en-de\n  data_files: train.jsonl\n"
    (books / "README.md").write_text(f"---\n{metadata}---\n")


if __name__ == "__main__":
    main()
