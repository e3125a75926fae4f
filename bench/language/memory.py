"""The recipes' estimate of a training's memory against the peak of its process.

    python bench/language/memory.py            # about five minutes on one core

Needs the packages of ``two_hosts.py``. Each configuration takes two steps in its own process
on the CPU; the peak is the kernel's ``ru_maxrss``, which also holds the libraries.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import two_hosts  # also puts src on the path

from paceline.recipes.language.memory import PROCESS_BYTES

RUN = """
import resource, sys
import torch
from paceline.recipes.language import RECIPE
torch.set_num_threads(1)
status = RECIPE.main(sys.argv[1:])
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(status)
"""
SFT = "sft --model={folder}/model --data={folder}/data --steps=2 --samples=0"
CONFIGURATIONS = {
    "LoRA, 4 × 128 tokens": f"{SFT} --global-batch=4",
    "LoRA, 16 × 128 tokens": f"{SFT} --global-batch=16",
    "the same, --gradient-checkpointing": f"{SFT} --global-batch=16 --gradient-checkpointing",
    "full, 4 × 128 tokens": f"{SFT} --global-batch=4 --method=full --lr=1e-5",
    "from scratch, --depth 6, 8 × 512": "language --data={folder}/text.txt --depth=6"
    " --vocab-size=4096 --global-batch=8 --steps=2",
}


def measure(flags: str, folder: Path, number: int) -> tuple[float, float, str]:
    """Returns estimate and peak in bytes, and the parts of the estimate."""
    recipe, *arguments = flags.format(folder=folder).split()
    argv = [sys.executable, "-c", RUN.replace("RECIPE", recipe), *arguments, "--device=cpu",
            f"--run-dir={folder}/run-{number}"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(two_hosts.ROOT / "src")}
    completed = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    match = re.search(r"memory of a process: about ([\d.]+) (\w+) \((.*)\)", completed.stdout)
    peak = re.search(r"^peak (\d+)", completed.stdout, re.MULTILINE)
    if completed.returncode or not match or not peak:
        raise SystemExit(completed.stdout[-1000:] + completed.stderr[-2000:])
    return float(match[1]) * {"MiB": 2**20, "GiB": 2**30}[match[2]], float(peak[1]), match[3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="keep model and data here for later runs")
    options = parser.parse_args()
    print(two_hosts.machine())
    print("\n| training | estimate, GB | peak, GB | peak without libraries to estimate | |")
    print("|---|--:|--:|--:|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        (folder / "data").mkdir(parents=True, exist_ok=True)
        if not (folder / "model").exists():
            two_hosts.save_model(folder / "model")
        if not (folder / "text.txt").exists():
            two_hosts.write_data(folder / "data", folder / "model", batch=4, steps=60)
            answers = [answer for _, answer in two_hosts.conversations()]
            (folder / "text.txt").write_text("\n\n".join(answers))
        for number, (title, flags) in enumerate(CONFIGURATIONS.items()):
            estimate, peak, parts = measure(flags, folder, number)
            without_libraries = peak - PROCESS_BYTES
            print(f"| {title} | {estimate / 1e9:.2f} | {peak / 1e9:.2f} |"
                  f" {without_libraries / estimate:.2f} | {parts} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
