"""Tests that a run reports separate models on its ranks, unless they exchanged gradients."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import local_ranks

from warm_agents import warm_agents

SCRIPT = Path(__file__).with_name("gradient_exchange.py")
PACELINE = [sys.executable, "-m", "paceline"]
WARNING = "paceline: warning: the ranks exchanged no gradients"
SEPARATE_MODELS = "paceline: note: the ranks exchanged nothing: each trained a model of its own"
INDEPENDENT = "paceline: note: the ranks exchanged nothing: each worked independently"


EXCHANGING = [
    ("ddp", "ranks"),
    ("ddp", "spawned"),
    ("fsdp", "ranks"),
    ("own", "ranks"),
    ("compiled", "ranks"),
    ("objects", "ranks"),
    ("average at the end", "ranks"),
    ("send", "ranks"),
    ("send without training", "ranks"),
]
REPORTS = {  # by scenario and processes
    ("metrics", "ranks"): f"{WARNING} (at most 1 element at a time)",
    ("metrics", "spawned"): f"{WARNING} (at most 1 element at a time)",
    ("no group", "ranks"): SEPARATE_MODELS,
    ("nothing", "ranks"): INDEPENDENT,
}


def run(folder: Path, scenario: str, processes: str, *options: str) -> str:
    args = ["-p", "2", "--run-dir", "run", *options, str(SCRIPT), scenario, processes]
    result = subprocess.run(
        [*PACELINE, "run", *args], cwd=folder, capture_output=True, text=True, timeout=400
    )
    assert result.returncode == 0, result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """Runs all scenarios, for which torch and its compiler are imported once."""
    with warm_agents(tmp_path_factory.mktemp("cache"), str(SCRIPT)):
        return {
            case: run(tmp_path_factory.mktemp("scenario"), *case)
            for case in (*EXCHANGING, *REPORTS)
        }


@pytest.mark.parametrize("case", EXCHANGING, ids="-".join)
def test_no_warning_if_ranks_exchange_gradients(
    case: tuple[str, str], shown: dict[tuple[str, str], str]
) -> None:
    assert "the ranks exchanged" not in shown[case]


@pytest.mark.parametrize("case", REPORTS, ids="-".join)
def test_reports_ranks_without_gradient_exchange(
    case: tuple[str, str], shown: dict[tuple[str, str], str]
) -> None:
    lines = shown[case].splitlines()
    assert [line.startswith(REPORTS[case]) for line in lines].count(True) == 1, lines


SPAWNING = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp

def train(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()

if __name__ == "__main__":
    port = 10_000 + os.getpid() % 20_000  # the system gives none of these to other sockets
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(port)
    mp.spawn(train, nprocs=2)
"""


def test_warns_if_ranks_spawn_separate_groups(tmp_path: Path) -> None:
    (tmp_path / "spawning.py").write_text(SPAWNING)
    argv = [*PACELINE, "run", "-p", "2", "spawning.py"]
    result = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert "paceline: warning: each rank started processes that" in result.stderr, result.stderr


def test_watches_torch_imported_by_script(tmp_path: Path) -> None:
    assert WARNING in run(tmp_path, "metrics", "ranks", "--no-torch")


def test_no_warning_for_non_python_program(tmp_path: Path) -> None:
    argv = [*PACELINE, "run", "-p", "2", "--no-python", "hostname"]
    result = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert "the ranks exchanged" not in result.stderr


WATCHED = """
import os, sys, torch, torch.distributed as dist
from paceline.agent.ranks.gradient_watch import GradientWatch, SOURCE
sys.modules.pop("paceline.train.session", None)  # of the fork server; it counts as exchanging
reading, writing = os.pipe()
watch = GradientWatch(os.getpid(), writing, SOURCE)
watch.install()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(2, 1)
"""
LONG_EVALUATION = f"""{WATCHED}
optimizer = torch.optim.SGD(model.parameters())
model(torch.ones(4, 2)).sum().backward()
dist.all_reduce(model.weight.grad)
optimizer.step()
for _ in range(2100):  # more than torch's recorder keeps
    dist.all_reduce(torch.ones(1))
watch.report()
os.set_blocking(reading, False)
try:
    print(os.read(reading, 1000))
except BlockingIOError:
    print("silent")
"""


def test_exchange_is_remembered_during_evaluation(tmp_path: Path) -> None:
    assert local_ranks.run_script(["-c", LONG_EVALUATION], tmp_path).out == "silent\n"


DESTROYED_GROUP = f"""{WATCHED}
model(torch.ones(4, 2)).sum().backward()
torch.optim.SGD(model.parameters()).step()
dist.destroy_process_group()
watch.report()
os.close(writing)
print(os.read(reading, 1000))
"""


def test_unused_group_is_reported_after_it_was_destroyed(tmp_path: Path) -> None:
    printed = local_ranks.run_script(["-c", DESTROYED_GROUP], tmp_path).out
    assert '"optimizer_steps": 1, "calls": 0' in printed
    assert '"exchanges": false' in printed
