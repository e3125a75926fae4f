"""Scripts that nobody here wrote, unmodified, over two lab hosts by ``paceline run``.

``python bench/scripts/public_scripts.py CHECKOUTS --python PYTHON`` prints Markdown. CHECKOUTS has
clones named ``OWNER+NAME``; PYTHON has what the scripts need (torch, torchvision, lightning,
transformers, datasets, evaluate, accelerate, timm, deepspeed). Some need a CUDA device and say so.
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
# what `fabric run` sets
FABRIC = {"LT_CLI_USED": "1", "LT_NUM_NODES": "2", "LT_DEVICES": "2", "LT_STRATEGY": "ddp",
          "LT_ACCELERATOR": "cpu"}  # fmt: skip
CPU = {"ACCELERATE_USE_CPU": "true"}


@dataclass(frozen=True)
class Trial:
    """One script.

    Attributes:
        repository: ``OWNER+NAME``.
        script: Path there.
        words: Its arguments.
        processes: Ranks on each of the two hosts.
        env: Variables, by which frameworks take what others take from arguments.
        beside: Run in the script's own folder.
        spawns: What joins is its own processes, which nobody counts.
    """

    repository: str
    script: str
    words: str = ""
    processes: int = 2
    env: dict[str, str] = field(default_factory=dict)
    beside: bool = False
    spawns: bool = False


def _accelerate(names: str) -> list[Trial]:
    return [
        Trial("huggingface+accelerate", f"examples/{name}.py", words.strip(), env=CPU)
        for name, _, words in (entry.partition(" ") for entry in names.split("|"))
    ]


TRIALS = [
    Trial("pytorch+examples", "imagenet/main.py",
          "-a resnet18 --no-accel --dist-backend gloo --dist-url env:// --world-size 2"
          " --multiprocessing-distributed --epochs 1 -b 8 -j 1 images", 1, spawns=True),
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
          "--dataset fake --backend gloo", beside=True),
    Trial("karpathy+nanoGPT", "train.py", "--backend=gloo --device=cpu --compile=False",
          beside=True),
]  # fmt: skip


@dataclass(frozen=True)
class Found:
    """How it went."""

    trial: Trial
    verdict: str
    joined: int
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--pythonpath", default="", help="for the scripts, on top of PYTHON's own")
    parser.add_argument("--env", action="append", default=[], help="NAME=VALUE for the scripts")
    parser.add_argument("--communication", default="exact", help="how gradients are sent")
    parser.add_argument("--only", default="", help="scripts whose path holds this word")
    parser.add_argument("--keep", action="store_true", help="leave the outputs for a look")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="public-scripts-", dir="/var/tmp"))
    try:
        report(options, folder)
    finally:
        if not options.keep:
            shutil.rmtree(folder)


def report(options: argparse.Namespace, folder: Path) -> None:
    """Runs them all and prints as they end."""
    env = {**os.environ, "PYTHONPATH": options.pythonpath}
    data = [options.python, str(Path(__file__).with_name("local_data.py")), str(folder / "work")]
    (folder / "work").mkdir()
    subprocess.run(data, check=True, env=env, stdout=subprocess.DEVNULL)
    print(
        "| repository | commit | script | ranks joined | s | verdict |\n|---|---|---|--:|--:|---|"
    )
    wanted = [t for t in TRIALS if options.only in f"{t.repository}/{t.script}"]
    prefix = Path(options.python).absolute().parents[1]
    shared = {str(one) for one in (folder, options.checkouts.resolve(), prefix)}
    with Lab(LabOptions(hosts=2, share=tuple(shared))) as lab:
        for trial in wanted:
            found = tried(trial, options, folder, lab)
            commit = commit_of(options.checkouts / trial.repository)
            print(
                f"| {trial.repository.replace('+', '/')} | {commit} | `{trial.script}` |"
                f" {found.joined} | {found.seconds:.0f} | {found.verdict} |",
                flush=True,
            )


def tried(trial: Trial, options: argparse.Namespace, folder: Path, lab: Lab) -> Found:
    """One script, once."""
    place = link_data(options.checkouts / trial.repository, folder / "work")
    script = options.checkouts.resolve() / trial.repository / trial.script
    run_dir = folder / re.sub(r"\W+", "-", f"{trial.repository}-{trial.script}")
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "PYTHONPATH": options.pythonpath,
           "TOKENIZERS_PARALLELISM": "false", **trial.env,
           **dict(one.split("=", 1) for one in options.env)}  # fmt: skip
    argv = [sys.executable, "-m", "paceline", "run", "-H", str(lab.hostfile), "--ssh-config",
            str(lab.ssh_config), "--python", options.python, "--run-dir", str(run_dir),
            "-p", str(trial.processes), "--communication", options.communication,
            *(word for name, value in env.items() for word in ("--env", f"{name}={value}")),
            str(script), *trial.words.split()]  # fmt: skip
    began = time.monotonic()
    done = subprocess.run(
        ["timeout", "--signal=INT", str(LIMIT_S), *argv], capture_output=True, text=True,
        check=False, cwd=script.parent if trial.beside else folder / "work",
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, errors="replace",
    )  # fmt: skip
    seconds = time.monotonic() - began
    (folder / f"{run_dir.name}.txt").write_text(done.stdout + done.stderr)
    for link in place:
        link.unlink()
    joined = ranks_joined(run_dir / "events.jsonl")
    complete = trial.spawns or joined == len(lab.names) * trial.processes
    words = verdict(done, complete)
    if words == "runs" and options.communication != "exact":
        words += gradients_of(run_dir / "events.jsonl", done.stderr)
    return Found(trial, words, joined, seconds)


def link_data(repository: Path, work: Path) -> list[Path]:
    """Lightning's examples look for their data inside the checkout; undone after the run."""
    wanted = [repository / "examples" / "Datasets", repository / "Datasets"]
    if "lightning" not in repository.name:
        return []
    made = [link for link in wanted if not link.exists()]
    for link in made:
        link.symlink_to(work / "Datasets")
    return made


def ranks_joined(events: Path) -> int:
    """Ranks that made the planned world."""
    lines = events.read_text().splitlines() if events.exists() else []
    return len({e["rank"] for e in map(json.loads, lines) if e["event"] == "world joined"})


def gradients_of(events: Path, err: str) -> str:
    """Whether gradients were compressed, in words that follow a verdict."""
    texts = {event["text"] for event in map(json.loads, events.read_text().splitlines())
             if event["event"] == "communication"}  # fmt: skip
    notes = re.findall(r"^paceline: (.*--communication.* did nothing.*)", err, re.MULTILINE)
    return f", {min(texts)[:60]}" if texts else f", {notes[0][:100]}" if notes else ", exact"


def verdict(done: subprocess.CompletedProcess[str], complete: bool) -> str:
    """In words; ``complete`` when all ranks made the planned world."""
    said = done.stdout + done.stderr
    if done.returncode == 0 and complete:
        return "runs"
    if refusal := re.search(r"SettingError: (--communication .*)", said):
        return f"refused: {refusal[1]}"
    if NEEDS_GPU.search(said):
        return "needs a GPU"
    own = re.findall(r"^paceline: (.*)", done.stderr, re.MULTILINE)
    first = re.findall(r"failed first: (.*)", done.stderr) or own[-1:]
    words = first[0] if first else "not all ranks joined"
    return f"status {done.returncode}: {words[:140].replace('|', '/')}"


def commit_of(repository: Path) -> str:
    argv = ["git", "-C", str(repository), "log", "-1", "--format=%h, %cs"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
