"""Tests scripts that set a rendezvous address of their own, as tutorials do."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import paceline

pytestmark = [pytest.mark.lab, pytest.mark.slow]

END = """
    value = torch.ones(1)
    dist.all_reduce(value)
    print(f"of {value.item():.0f}\\n", end="", flush=True)
    dist.destroy_process_group()
"""
HEAD = "import os, torch, torch.distributed as dist, torch.multiprocessing as mp\n"
SPAWN = '\nif __name__ == "__main__":\n    mp.spawn(work, args=(2,), nprocs=2)\n'

SCRIPTS = {
    "tcp": HEAD
    + "def work(i, n):\n"
    + '    tcp = "tcp://127.0.0.1:23456"\n'
    + '    dist.init_process_group("gloo", init_method=tcp, rank=i, world_size=n)'
    + END
    + SPAWN,
    "variables": HEAD
    + "def work(i, n):\n"
    + '    os.environ["MASTER_ADDR"] = "localhost"\n'
    + '    os.environ["MASTER_PORT"] = "12355"\n'
    + '    dist.init_process_group("gloo", rank=i, world_size=n)'
    + END
    + SPAWN,
    "either": HEAD
    + 'DEFAULT = "tcp://224.66.41.62:23456"\n'
    + "def work(i, n):\n"
    + '    dist.init_process_group("gloo", init_method="env://", rank=i, world_size=n)'
    + END
    + SPAWN,
    "inherited": HEAD
    + "def work(i, n):\n"
    + '    dist.init_process_group("gloo", rank=i, world_size=n)'
    + END
    + SPAWN,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_spawned_processes_form_group(name: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPTS[name])
    assert run(tmp_path, "-p", "1") == 2


def test_ranks_use_script_master_address(tmp_path: Path) -> None:
    """The ranks do not use the planned address, which the script does not know."""
    text = HEAD + (
        'os.environ["MASTER_ADDR"] = "127.0.0.1"\n'
        'os.environ["MASTER_PORT"] = "29511"\n'
        'dist.init_process_group("gloo")'
    ) + END.replace("\n    ", "\n")  # fmt: skip
    (tmp_path / "script.py").write_text(text)
    assert run(tmp_path, "-p", "2") == 2


def run(folder: Path, *options: str) -> int:
    """Runs the script; returns how many processes had a world size of two."""
    result = paceline("run", *options, "script.py", cwd=folder)
    assert result.returncode == 0, result.stderr
    return result.stdout.count("of 2")
