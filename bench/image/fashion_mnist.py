"""Fashion-MNIST on three lab hosts over SSH and in one process: same accuracy?

Needs Debian's package dataset-fashion-mnist. Three epochs each, global batch 256, else the
recipe's own settings.

    python bench/image/fashion_mnist.py [--out FILE]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paceline.cluster.lab import Lab, LabOptions

TRAIN = [sys.executable, "-m", "paceline", "train", "image", "--data", "fashion-mnist",
         "--epochs", "3", "--global-batch", "256"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = [
        f"# Fashion-MNIST, {datetime.date.today().isoformat()}",
        "",
        f"{platform.machine()}, {os.cpu_count()} CPUs for all processes together; "
        f"`{' '.join(TRAIN[2:])}`, all 10,000 test images.",
        "",
        "| | test accuracy | seconds |",
        "|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with Lab(LabOptions(hosts=3)) as lab:
            where = ["--hosts", str(lab.hostfile), "--ssh-config", str(lab.ssh_config)]
            lines.append(row("3 hosts × 1 process, SSH", where))
        lines.append(row("1 process", []))
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


def row(name: str, where: list[str]) -> str:
    begun = time.monotonic()
    run = Path(name.replace(" ", "-"))
    subprocess.run([*TRAIN, *where, "--run-dir", str(run)], check=True, timeout=1800)
    metrics = json.loads((run / "result.json").read_text())["metrics"]
    assert metrics["samples"] == 10_000, metrics
    return f"| {name} | {metrics['accuracy']:.4f} | {time.monotonic() - begun:.0f} |"


if __name__ == "__main__":
    main()
