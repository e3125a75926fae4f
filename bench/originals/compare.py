"""Published scripts beside the recipes: figure at equal epochs, and time to the same figure.

    python bench/originals/compare.py CHECKOUTS DATA --python PYTHON [--only NAME] [--out FILE]

CHECKOUTS holds the repositories named in ``scripts.py`` (and ``pytorch_mnist.py`` by itself).
PYTHON has what the scripts need: torchvision (see ``torchvision_alone.py``), torchmetrics,
tensorboardX, datasets, wandb. DATA is made here, as far as it is missing: Fashion-MNIST from
Debian's package, the message catalogues of installed packages; CIFAR-10 by ``cifar10.py``.

Script and recipe run one after the other with all CPUs of this machine. The recipe runs twice:
once for as many epochs, once until its held-out figure is the script's, the evaluations
that show it within the time. Data, epochs and the sizes of the script's own command are typed;
everything else is the recipe's default. Times are those of the whole command, from start to end.
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
from scripts import SCRIPTS, Line, Script

FASHION = Path("/usr/share/datasets/fashion-mnist")
PAIRS = 6000


@dataclass(frozen=True)
class Outcome:
    """What a command reached, and the seconds it took."""

    figure: float
    seconds: float


def main() -> None:
    options = parser().parse_args()
    make_data(options.data)
    rows = []
    for name in options.only or SCRIPTS:
        rows.append(compared(name, SCRIPTS[name], options))
        print(rows[-1], flush=True)
    text = "\n".join([*head(), *rows, ""])
    print(text)
    if options.out:
        options.out.write_text(text)


def parser() -> argparse.ArgumentParser:
    form = argparse.RawTextHelpFormatter
    made = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    made.add_argument("checkouts", type=lambda text: Path(text).resolve())
    made.add_argument("data", type=lambda text: Path(text).resolve())
    made.add_argument("--python", type=Path, default=Path(sys.executable))
    made.add_argument("--only", action="append", choices=SCRIPTS)
    made.add_argument("--out", type=Path)
    return made


def head() -> list[str]:
    return [
        f"{platform.machine()}, {os.cpu_count()} CPUs, all for one command at a time.",
        "",
        "| script | figure | script's | s | recipe's | s | s to the script's figure | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]


def compared(name: str, script: Script, options: argparse.Namespace) -> str:
    """A row of the table."""
    theirs = run_script(script, options)
    ours = run_ours(script, options.data, ())
    cells = [name, script.figure, f"{theirs.figure:.4g}", f"{theirs.seconds:.0f}"]
    cells += [f"{ours.figure:.4g}", f"{ours.seconds:.0f}"]
    if script.reaches:
        until = run_ours(script, options.data, (f"--stop-at={theirs.figure}",))
        assert until.figure >= theirs.figure, until
        cells += [f"{until.seconds:.0f}", f"{until.seconds / theirs.seconds:.2f}"]
    else:  # a rate: the time for the same work
        cells += ["", f"{theirs.figure / ours.figure:.2f}"]
    return f"| {' | '.join(cells)} |"


def run_script(script: Script, options: argparse.Namespace) -> Outcome:
    with copied(script, options) as copy:
        command = [*starter(script, options.python), copy.name, *script.arguments]
        started = time.monotonic()
        lines = stamped(command, copy.parent, script)
        figure = script.read(lines)
        assert figure is not None, "\n".join(line for _, line in lines[-20:])
        return Outcome(figure, lines[-1][0] if lines else time.monotonic() - started)


def starter(script: Script, python: Path) -> list[str]:
    if script.command[0] == "torchrun":
        return [str(python), "-m", "torch.distributed.run", *script.command[1:]]
    return [str(python)]


@contextmanager
def copied(script: Script, options: argparse.Namespace) -> Iterator[Path]:
    """The script in a folder of its own, changed as its entry says."""
    with tempfile.TemporaryDirectory() as temporary:
        original = options.checkouts / script.path
        folder = Path(temporary)
        for beside in original.parent.glob("*.py"):
            shutil.copy(beside, folder)
        text = original.read_text()
        for old, new in script.changes:
            assert old in text, old
            text = text.replace(old, new.replace("{data}", str(options.data)))
        copy = folder / original.name
        copy.write_text(text)
        for stub in script.stubs:
            (folder / f"{stub}.py").touch()
        (folder / "data").symlink_to(options.data)
        yield copy


def stamped(command: Sequence[str], folder: Path, script: Script) -> list[Line]:
    """What a command printed, each line with its time; a rate is complete before the end."""
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
    begun, lines = time.monotonic(), list[Line]()
    for line in process.stdout:
        lines.append((time.monotonic() - begun, line.rstrip()))
        if not script.reaches and script.read(lines) is not None:
            os.killpg(process.pid, signal.SIGKILL)
            break
    process.wait()
    lines.append((time.monotonic() - begun, ""))
    return lines


def run_ours(script: Script, data: Path, more: Sequence[str]) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        flags = [flag.replace("{data}", str(data)) for flag in script.ours]
        run = ["--run-dir", folder + "/run", "--checkpoint-every=never", "--resume=never"]
        begun = time.monotonic()
        command = [sys.executable, "-m", "paceline", *flags, *run, *more]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return Outcome(reached(Path(folder, "run"), script), time.monotonic() - begun)


def reached(run: Path, script: Script) -> float:
    """The held-out figure of a run of ours, or its samples a second."""
    if not script.reaches:
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return float([one for one in records if one["split"] == "train"][-1]["samples_per_s"])
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
    """A part of the catalogues as lines, and in the form of opus_books."""
    found = corpus("de")
    pairs = found[:: max(1, len(found) // PAIRS)][:PAIRS]
    (folder / "pairs.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    books = folder / "opus_books"
    books.mkdir(exist_ok=True)
    rows = (
        json.dumps({"translation": dict(zip(("en", "de"), pair, strict=True))}) for pair in pairs
    )
    (books / "train.jsonl").write_text("\n".join(rows) + "\n")
    named = "configs:\n- config_name: en-de\n  data_files: train.jsonl\n"
    (books / "README.md").write_text(f"---\n{named}---\n")


if __name__ == "__main__":
    main()
