"""Runs unmodified public scripts on two lab hosts with ``paceline run``.

``python bench/scripts/public_scripts.py CHECKOUTS --python PYTHON`` prints Markdown. CHECKOUTS has
clones named ``OWNER+NAME``; PYTHON has the scripts' requirements (torch, torchvision,
lightning, transformers, datasets, evaluate, accelerate, timm, deepspeed). Scripts that need a CUDA
device are reported as such.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from paceline.lab import Lab, LabOptions

SOURCE = Path(__file__).resolve().parents[2] / "src"
LIMIT_S = 900  # other programs may share the machine
NEEDS_GPU = re.compile(
    r"not compiled with CUDA|no NVIDIA driver|Cannot access accelerator|"
    r"Unable to locate sufficient|No CUDA GPUs|NCCL|_cuda_setDevice|Device index must not|"
    r"device_ids and output_device arguments only work with"
)
LIGHTNING = {"PL_TRAINER_NUM_NODES": "2", "PL_TRAINER_DEVICES": "2", "PL_TRAINER_STRATEGY": "ddp",
             "PL_TRAINER_ACCELERATOR": "cpu"}  # fmt: skip
# variables that `fabric run` sets
FABRIC = {"LT_CLI_USED": "1", "LT_NUM_NODES": "2", "LT_DEVICES": "2", "LT_STRATEGY": "ddp",
          "LT_ACCELERATOR": "cpu"}  # fmt: skip
CPU = {"ACCELERATE_USE_CPU": "true"}


@dataclass(frozen=True)
class Trial:
    """One script with its arguments.

    Attributes:
        repository: ``OWNER+NAME``.
        script: Path in the repository.
        arguments: Arguments of the script.
        processes: Ranks on each of the two hosts.
        env: Variables that configure the framework.
        in_script_folder: Whether to run in the folder of the script.
        spawns_ranks: Whether the script starts the ranks itself, so that they are not counted.
    """

    repository: str
    script: str
    arguments: str = ""
    processes: int = 2
    env: dict[str, str] = field(default_factory=dict)
    in_script_folder: bool = False
    spawns_ranks: bool = False


def _accelerate(names: str) -> list[Trial]:
    return [
        Trial("huggingface+accelerate", f"examples/{name}.py", arguments.strip(), env=CPU)
        for name, _, arguments in (entry.partition(" ") for entry in names.split("|"))
    ]


TRIALS = [
    Trial("pytorch+examples", "imagenet/main.py",
          "-a resnet18 --no-accel --dist-backend gloo --dist-url env:// --world-size 2"
          " --multiprocessing-distributed --epochs 1 -b 8 -j 1 images", 1, spawns_ranks=True),
    Trial("pytorch+examples", "distributed/ddp/example.py"),
    Trial("pytorch+examples", "distributed/ddp-tutorial-series/multinode.py", "2 1"),
    Trial("pytorch+examples", "distributed/FSDP2/example.py"),
    Trial("pytorch+examples", "distributed/minGPT-ddp/mingpt/main.py"),
    Trial("pytorch+examples", "distributed/tensor_parallelism/tensor_parallel_example.py"),
    *_accelerate(
        "nlp_example --cpu|complete_nlp_example --cpu --checkpointing_steps epoch|"
        "by_feature/checkpointing --cpu --checkpointing_steps epoch|"
        "by_feature/gradient_accumulation --cpu --gradient_accumulation_steps 2|"
        "by_feature/automatic_gradient_accumulation --cpu|by_feature/local_sgd --cpu|"
        "by_feature/memory --cpu|by_feature/multi_process_metrics --cpu|"
        "by_feature/early_stopping --cpu|by_feature/profiler --cpu|"
        "by_feature/ddp_comm_hook|by_feature/ddp_comm_hook --ddp_comm_hook fp16|"
        "by_feature/tracking --cpu"
    ),
    Trial("huggingface+trl", "trl/scripts/sft.py",
          "--model_name_or_path gpt2 --dataset_name chats --output_dir sft --use_cpu --bf16 false"
          " --max_steps 3 --per_device_train_batch_size 2 --report_to none --eos_token [SEP]"),
    Trial("tatsu-lab+stanford_alpaca", "train.py",
          "--model_name_or_path gpt2 --data_path instructions.json --output_dir alpaca --use_cpu"
          " --max_steps 3 --per_device_train_batch_size 2 --report_to none"),
    Trial("Lightning-AI+pytorch-lightning", "examples/pytorch/bug_report/bug_report_model.py",
          env=LIGHTNING),
    Trial("Lightning-AI+pytorch-lightning", "examples/pytorch/basics/autoencoder.py",
          "--trainer.max_steps 5 --trainer.limit_val_batches 2 --trainer.accelerator cpu"
          " --trainer.devices 2 --trainer.num_nodes 2 --trainer.strategy ddp"),
    Trial("Lightning-AI+pytorch-lightning", "examples/pytorch/basics/backbone_image_classifier.py",
          "--trainer.max_steps 5 --trainer.limit_val_batches 2 --trainer.limit_test_batches 2"
          " --trainer.accelerator cpu --trainer.devices 2 --trainer.num_nodes 2"
          " --trainer.strategy ddp --trainer.max_epochs 1"),
    Trial("Lightning-AI+pytorch-lightning", "examples/pytorch/domain_templates/imagenet.py",
          "fit --model.data_path images --model.batch_size 4 --model.workers 1"
          " --trainer.max_steps 3 --trainer.accelerator cpu"
          " --trainer.devices 2 --trainer.num_nodes 2 --trainer.strategy ddp"),
    Trial("Lightning-AI+pytorch-lightning", "examples/fabric/image_classifier/train_fabric.py",
          "--dry-run --epochs 1", env=FABRIC),
    Trial("Lightning-AI+pytorch-lightning", "examples/fabric/kfold_cv/train_fabric.py",
          "--dry-run --epochs 1 --folds 2", env=FABRIC),
    Trial("huggingface+pytorch-image-models", "train.py",
          "--data-dir images --model test_resnet --device cpu --epochs 1 -b 4 -j 1 --num-classes 2"
          " --output timm"),
    Trial("microsoft+DeepSpeedExamples", "training/HelloDeepSpeed/train_bert_ds.py",
          "--checkpoint_dir deepspeed --num_layers 2 --num_heads 2 --ff_dim 32 --h_dim 32"
          " --num_iterations 4 --log_every 1 --batch_size 4 --dtype bf16"),
    Trial("microsoft+DeepSpeedExamples", "training/gan/gan_deepspeed_train.py",
          "--dataset fake --backend gloo", in_script_folder=True),
    Trial("karpathy+nanoGPT", "train.py", "--backend=gloo --device=cpu --compile=False",
          in_script_folder=True),
]  # fmt: skip


@dataclass(frozen=True)
class Result:
    """Result of a trial."""

    trial: Trial
    verdict: str
    num_joined: int
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--pythonpath", default="", help="additional path for the scripts")
    parser.add_argument("--env", action="append", default=[], help="NAME=VALUE for the scripts")
    parser.add_argument("--communication", default="exact", help="communication method")
    parser.add_argument("--only", default="", help="scripts whose path contains this text")
    parser.add_argument("--keep", action="store_true", help="keep the outputs")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="public-scripts-", dir="/var/tmp"))
    try:
        report(options, folder)
    finally:
        if not options.keep:
            shutil.rmtree(folder)


def report(options: argparse.Namespace, folder: Path) -> None:
    """Run the selected scripts and print a row for each."""
    env = {**os.environ, "PYTHONPATH": options.pythonpath}
    data = [options.python, str(Path(__file__).with_name("local_data.py")), str(folder / "work")]
    (folder / "work").mkdir()
    subprocess.run(data, check=True, env=env, stdout=subprocess.DEVNULL)
    print(
        "| repository | commit | script | ranks joined | s | verdict |\n|---|---|---|--:|--:|---|"
    )
    selected = [t for t in TRIALS if options.only in f"{t.repository}/{t.script}"]
    prefix = Path(options.python).absolute().parents[1]
    shared = {str(path) for path in (folder, options.checkouts.resolve(), prefix)}
    with Lab(LabOptions(hosts=2, share=tuple(shared))) as lab:
        for trial in selected:
            result = run_trial(trial, options, folder, lab)
            commit = commit_of(options.checkouts / trial.repository)
            print(
                f"| {trial.repository.replace('+', '/')} | {commit} | `{trial.script}` |"
                f" {result.num_joined} | {result.seconds:.0f} | {result.verdict} |",
                flush=True,
            )


def run_trial(trial: Trial, options: argparse.Namespace, folder: Path, lab: Lab) -> Result:
    """Run one script."""
    links = link_data(options.checkouts / trial.repository, folder / "work")
    script = options.checkouts.resolve() / trial.repository / trial.script
    run_dir = folder / re.sub(r"\W+", "-", f"{trial.repository}-{trial.script}")
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "PYTHONPATH": options.pythonpath,
           "TOKENIZERS_PARALLELISM": "false", **trial.env,
           **dict(variable.split("=", 1) for variable in options.env)}  # fmt: skip
    argv = [sys.executable, "-m", "paceline", "run", "-H", str(lab.hostfile), "--ssh-config",
            str(lab.ssh_config), "--python", options.python, "--run-dir", str(run_dir),
            "-p", str(trial.processes), "--communication", options.communication,
            *(argument for name, value in env.items() for argument in ("--env", f"{name}={value}")),
            str(script), *trial.arguments.split()]  # fmt: skip
    start = time.monotonic()
    completed = subprocess.run(
        ["timeout", "--signal=INT", str(LIMIT_S), *argv], capture_output=True, text=True,
        check=False, cwd=script.parent if trial.in_script_folder else folder / "work",
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, errors="replace",
    )  # fmt: skip
    seconds = time.monotonic() - start
    (folder / f"{run_dir.name}.txt").write_text(completed.stdout + completed.stderr)
    for link in links:
        link.unlink()
    num_joined = ranks_joined(run_dir / "events.jsonl")
    is_complete = trial.spawns_ranks or num_joined == len(lab.names) * trial.processes
    outcome = describe_result(completed, is_complete)
    if outcome == "runs" and options.communication != "exact":
        outcome += describe_gradients(run_dir / "events.jsonl", completed.stderr)
    return Result(trial, outcome, num_joined, seconds)


def link_data(repository: Path, work: Path) -> list[Path]:
    """Link the data into Lightning's checkout, where its examples expect it. Returns the links."""
    candidates = [repository / "examples" / "Datasets", repository / "Datasets"]
    if "lightning" not in repository.name:
        return []
    created = [link for link in candidates if not link.exists()]
    for link in created:
        link.symlink_to(work / "Datasets")
    return created


def ranks_joined(events: Path) -> int:
    """Number of ranks that joined the planned world."""
    lines = events.read_text().splitlines() if events.exists() else []
    return len({e["rank"] for e in map(json.loads, lines) if e["event"] == "world joined"})


def describe_gradients(events: Path, err: str) -> str:
    """Text after a verdict that describes the compression of gradients."""
    texts = {event["text"] for event in map(json.loads, events.read_text().splitlines())
             if event["event"] == "communication"}  # fmt: skip
    notes = re.findall(r"^paceline: (.*--communication.* did nothing.*)", err, re.MULTILINE)
    return f", {min(texts)[:60]}" if texts else f", {notes[0][:100]}" if notes else ", exact"


def describe_result(completed: subprocess.CompletedProcess[str], is_complete: bool) -> str:
    """Verdict on a run; ``is_complete``: whether all ranks joined the planned world."""
    output = completed.stdout + completed.stderr
    if completed.returncode == 0 and is_complete:
        return "runs"
    if refusal := re.search(r"SettingError: (--communication .*)", output):
        return f"refused: {refusal[1]}"
    if NEEDS_GPU.search(output):
        return "needs a GPU"
    messages = re.findall(r"^paceline: (.*)", completed.stderr, re.MULTILINE)
    failures = re.findall(r"failed first: (.*)", completed.stderr) or messages[-1:]
    reason = failures[0] if failures else "not all ranks joined"
    return f"status {completed.returncode}: {reason[:140].replace('|', '/')}"


def commit_of(repository: Path) -> str:
    argv = ["git", "-C", str(repository), "log", "-1", "--format=%h, %cs"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
