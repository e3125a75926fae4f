"""The Transformers Trainer with checkpoints of its own: ``own_trainer.py FOLDER STEPS``."""

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Data(Dataset):
    def __len__(self) -> int:
        return 512

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((4,), float(at)) / 32, "labels": torch.ones(1)}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}


class Slow(TrainerCallback):
    def on_train_begin(self, args, state, control, **_):
        print(f"from step {state.global_step}", flush=True)

    def on_step_end(self, args, state, control, **_):
        time.sleep(0.05)


folder = str(Path(sys.argv[1]) / "trainer")
arguments = TrainingArguments(
    folder, per_device_train_batch_size=4, max_steps=int(sys.argv[2]), use_cpu=True, report_to=[],
    save_strategy="steps", save_steps=10, save_total_limit=2, logging_strategy="no",
    disable_tqdm=True, ddp_backend="gloo",
)  # fmt: skip
last = get_last_checkpoint(folder) if Path(folder).is_dir() else None
trainer = Trainer(Model(), arguments, train_dataset=Data(), callbacks=[Slow()])
trainer.train(resume_from_checkpoint=last)
place, size = arguments.process_index, arguments.world_size
print(f"done {place} of {size} steps {trainer.state.global_step}", flush=True)
