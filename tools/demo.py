"""What `make demo` does: the image recipe on two hosts over SSH, or on two local processes."""

from __future__ import annotations

import os
import subprocess
import sys

from paceline.lab import Lab, LabOptions

PACELINE = [sys.executable, "-m", "paceline"]


def main() -> int:
    """Trains the bundled digits; the exit status is the training's."""
    reason = Lab.available()
    if reason is not None:
        print(f"No virtual cluster here ({reason}): two processes on this machine instead.\n")
        return train(["--nproc-per-node", "2"])
    with Lab(LabOptions(hosts=2)) as lab:
        names = " and ".join(lab.names)
        print(f"A virtual cluster is up: {names}, each with its own network and sshd.\n")
        os.environ["PACELINE_LAB"] = lab.name  # several may be up
        status = train(["-H", "lab"])
    print("\nThe virtual cluster is down again; nothing of it is left.")
    print("For paceline in this shell:  . .venv/bin/activate")
    return status


def train(where: list[str]) -> int:
    """Runs the command that a user would type, and shows it."""
    command = ["train", "image", *where]
    print(f"$ paceline {' '.join(command)}", flush=True)
    return subprocess.run([*PACELINE, *command], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
