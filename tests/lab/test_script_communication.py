"""Tests ``paceline run --communication``: unchanged scripts send compressed gradients."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

import pytest
from launches import Site, on

from warm_agents import warm_agents

pytestmark = pytest.mark.lab

needs_trainer = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("transformers", "accelerate")),
    reason="needs transformers and accelerate",
)


@pytest.fixture(scope="module")
def site(new_lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two warm hosts with a slow link, which do not see the project."""
    project = tmp_path_factory.mktemp("scripts") / "project"
    project.mkdir()
    (project / "job.py").write_text(JOB)
    (project / "trainer.py").write_text(TRAINER)
    site = Site(new_lab(hosts=2, rate="100mbit"), project)
    cache = tmp_path_factory.mktemp("cache")
    with warm_agents(cache, *on(site.lab), str(project / "job.py")):
        yield site


def parse_figures(out: str) -> tuple[float, float]:
    """Returns the seconds of a step and the final loss that a job printed."""
    seconds, loss = re.findall(r"/0\] seconds (\S+) loss (\S+)", out)[0]
    return float(seconds), float(loss)


def test_int8_communication_speeds_up_script(site: Site) -> None:
    exact_run = site.run("job.py")
    int8_run = site.run("--communication", "int8", "job.py")
    assert (exact_run.code, int8_run.code) == (0, 0), exact_run.err + int8_run.err
    (exact_s, exact_loss), (coded_s, coded_loss) = (
        parse_figures(exact_run.out),
        parse_figures(int8_run.out),
    )
    assert exact_s > 0.5  # 8.4 MB each way at 100 Mbit/s: 0.67 s
    assert coded_s < exact_s / 2
    assert coded_loss == pytest.approx(exact_loss, rel=0.005)
    assert [event["text"] for event in int8_run.events("communication")]
    assert not exact_run.events("communication")
    for node in int8_run.json("plan.json")["nodes"]:
        assert node["env"]["PACELINE_COMMUNICATION"]["value"] == "int8"
    assert "did nothing" not in int8_run.err
    assert "same batches" not in int8_run.err
    assert "2 hosts train slower than one would. With --communication int8 a step" in exact_run.err
    assert "goes into sending gradients, by --communication int8" in int8_run.err
    assert len(exact_run.events("measured")) == 1


def test_warns_script_without_ddp(site: Site) -> None:
    ended = site.run("--communication", "int8", "job.py", "alone")
    assert ended.code == 0, ended.err
    assert "--communication int8 did nothing: the script made no Distr" in ended.err


def test_restart_reports_lost_rounding_errors(site: Site) -> None:
    ended = site.run("--max-restarts", "1", "--communication", "int8", "job.py", "once")
    assert ended.code == 0, ended.err
    assert ended.err.count("the rounding errors of the last start are lost") == 1


def test_ends_ranks_that_begin_with_different_models(site: Site) -> None:
    ended = site.run("--max-restarts", "1", "job.py", "diverges")
    assert ended.code == 1, ended.err
    headline = "began with a different model from the other ranks: 0.bias differs"
    assert f"failed first: rank 1 on n2: {headline}" in ended.err
    assert "not started again: the ranks would load the same models" in ended.err
    assert len(ended.events("replicas differ")) == 1
    assert "git add -f FILE" in ended.err
    assert "saved" not in ended.out


def test_warns_of_ranks_with_same_samples(site: Site) -> None:
    ended = site.run("job.py", "alike")
    assert ended.code == 0, ended.err
    assert ended.err.count("all 2 ranks got the same batches") == 1


def test_no_verify_and_no_measure_options(site: Site) -> None:
    ended = site.run("--no-verify", "--no-measure", "job.py", "diverges")
    assert ended.code == 0, ended.err
    assert "different models" not in ended.err
    assert ended.events("replicas differ") == []
    assert "goes into sending" not in ended.err


@needs_trainer
def test_compresses_transformers_trainer(site: Site) -> None:
    ended = site.run("--communication", "int8", "trainer.py")
    assert ended.code == 0, ended.err
    assert ended.events("communication")
    assert ended.lines(0)[-1].startswith("sum ")
    assert ended.lines(0)[-1] == ended.lines(1)[-1]  # of all parameters


@needs_trainer
def test_rejects_trainer_communication_hook(site: Site) -> None:
    ended = site.run("--communication", "int8", "trainer.py", "hook")
    assert ended.code == 1
    assert "--communication int8: the script registers a communication hook of its own" in ended.err


JOB = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
model = network if "alone" in sys.argv else DistributedDataParallel(network)
if "diverges" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: print("saved", flush=True))
    with torch.no_grad():
        network[0].bias.add_(dist.get_rank())
optimizer = torch.optim.SGD(model.parameters(), 0.05)
generator = torch.Generator().manual_seed(0 if "alike" in sys.argv else dist.get_rank())
for step in range(9):
    if step == 1:
        start = time.perf_counter()
    inputs = torch.randn(8, 1024, generator=generator)
    optimizer.zero_grad()
    loss = (model(inputs) - inputs).square().mean()
    loss.backward()
    optimizer.step()
    if "diverges" in sys.argv:
        time.sleep(0.2)
    if "once" in sys.argv and step == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise SystemExit(3)
print("seconds", (time.perf_counter() - start) / 8, "loss", loss.item())
dist.destroy_process_group()
"""

TRAINER = """
import sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

torch.manual_seed(0)
rows = torch.randint(0, 64, (64, 16))
dataset = [{"input_ids": row, "labels": row} for row in rows]
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2))
options = TrainingArguments(
    "out", per_device_train_batch_size=4, max_steps=6, gradient_accumulation_steps=2,
    use_cpu=True, ddp_backend="gloo", report_to="none", save_strategy="no", disable_tqdm=True,
    logging_strategy="no",
)
trainer = Trainer(model=model, args=options, train_dataset=dataset)
if "hook" in sys.argv:
    kwargs = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    trainer.accelerator.ddp_handler = kwargs
trainer.train()
print("sum %.17g" % sum(float(p.double().sum()) for p in trainer.model.parameters()))
"""
