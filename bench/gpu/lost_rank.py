"""A training for `paceline run` that loses a rank; several ranks share one GPU.

    paceline run -p 3 bench/gpu/lost_rank.py OUT [--lose SLOT:MOMENT:STEP] [--how kill|stop] …

MOMENT is `given` (before the forward pass), `forward` or `stepped` (after it, after the step), or
`during`: a few milliseconds after the step begins, by a timer. `connecting` with step 0 loses the
replacement of a lost rank, while all ranks create their first communicator with it. Each rank
records the time of each step in OUT/steps.SLOT.PID, and rank 0 saves the parameters to OUT/end.pt.
With --dry the ranks compute on CPUs, with the tests' stand-in for NCCL.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests/train")]

SLOT = int(os.environ.get("RANK", "0"))
IS_NEWCOMER = "PACELINE_NEWCOMER" in os.environ
BATCH, SAMPLES, CLASSES = 48, 480, 10


class Net(nn.Module):
    """Linear layers with a buffer that each pass changes and DDP broadcasts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(3))
        self.layers = nn.Sequential(
            nn.Linear(64, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, CLASSES),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        outputs: torch.Tensor = self.layers(inputs) * (1 + self.passes.mean() / 1000)
        return outputs


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--lose", action="append", default=[])
    parser.add_argument("--how", choices=("kill", "stop"), default="kill")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--slow", metavar="SLOT:SECONDS", default="-1:0")  # extra time per step
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--pause", type=float, default=0.1)  # minimum seconds of a step
    parser.add_argument("--communication", default="exact")
    return parser.parse_args()


def lose_rank(options: argparse.Namespace, moment: str, step: int) -> None:
    """End or stop this process if ``--lose`` names this moment; at most once in a run."""
    for loss in options.lose:
        slot, loss_moment, number = loss.split(":")
        mark = options.out / f"lost.{slot}.{number}"
        is_target = IS_NEWCOMER if moment == "connecting" else not IS_NEWCOMER
        if (
            (int(slot), loss_moment, int(number)) != (SLOT, moment, step)
            or not is_target
            or mark.exists()
        ):
            continue
        number_of_signal = signal.SIGKILL if options.how == "kill" else signal.SIGSTOP

        if moment == "connecting":
            others = [f"connecting/{rank}" for rank in range(dist.get_world_size())]
            dist.distributed_c10d._get_default_store().wait(others)

        def end_process(mark: Path = mark, number: int = number_of_signal) -> None:
            mark.write_text(repr(time.time()))
            os.kill(os.getpid(), number)

        if moment == "during":
            threading.Timer(0.004, end_process).start()
        else:
            end_process()


def main() -> None:
    from paceline import train
    from paceline.train import device as devices
    from paceline.train.elastic.device_group import DeviceGroup

    options = read_options()
    options.out.mkdir(parents=True, exist_ok=True)
    stacks = (options.out / f"stacks.{SLOT}.{os.getpid()}").open("w")
    faulthandler.dump_traceback_later(40, repeat=True, file=stacks)
    os.environ["NCCL_HOSTID"] = f"slot{SLOT}"  # NCCL treats each rank as a host
    choose = devices.choose_device
    devices.choose_device = lambda requested, available, _: choose(requested, available, 0)
    if not options.dry and not DeviceGroup.is_supported():  # a launcher also announces losses
        print("this torch does not report errors of NCCL", flush=True)
        DeviceGroup.is_supported = classmethod(lambda _: True)
        DeviceGroup._error_of = lambda *_: ""
    handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    if options.dry and not options.shard and handling == "1":
        import device_stand_in

        device_stand_in.use()
    connect = DeviceGroup.connect

    def connect_or_end(group: DeviceGroup) -> None:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"connecting/{dist.get_rank()}", b"1")
        lose_rank(options, "connecting", 0)
        connect(group)

    DeviceGroup.connect = connect_or_end
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 64, generator=generator, dtype=torch.float64)
    data = TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))
    slow_slot, seconds = options.slow.split(":")
    extra_s = float(seconds) if int(slow_slot) == SLOT else 0.0
    steps = (options.out / f"steps.{SLOT}.{os.getpid()}").open("w")
    device_type = "cpu" if options.dry else "cuda"
    with train.join("lost", dtype="float64", seed=3, device=device_type, log_every=5) as session:
        network = session.place(Net(options.width), shard=options.shard)
        optimizer = torch.optim.AdamW(network.parameters(), 0.001)
        model = session.prepare(network, optimizer, communication=options.communication)
        loader = session.loader(data, BATCH)
        session.checkpoints(every="20")
        for _ in session.epochs(loader, options.epochs):
            for batch in loader:
                images, classes = batch
                start, step = time.time(), session.progress.step
                lose_rank(options, "given", step)
                lose_rank(options, "during", step)
                time.sleep(extra_s)
                losses = cross_entropy(model(images), classes, reduction="none")
                lose_rank(options, "forward", step)
                has_stepped = session.step(losses)
                lose_rank(options, "stepped", step)
                world = session.world
                record = [time.time(), step, has_stepped, world.rank, world.size]
                steps.write(json.dumps(record) + "\n")
                steps.flush()
                time.sleep(max(0.0, options.pause - (time.time() - start)))
        session.verify()
        if session.world.rank == 0:
            state = {"model": network.state_dict(), "moments": optimizer.state_dict()["state"]}
            torch.save(state, options.out / "end.pt")
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
