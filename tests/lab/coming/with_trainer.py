"""As in the Transformers guide: a model that gives its loss, and the Trainer."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class Data(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((4,), float(at)) / 32, "labels": torch.ones(1)}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=4, num_train_epochs=1, use_cpu=True, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, ddp_backend="gloo",
    )  # fmt: skip
    trainer = Trainer(Model(), arguments, train_dataset=Data())
    trainer.train()
    place, size = arguments.process_index, arguments.world_size
    print(f"trainer {place} of {size} steps {trainer.state.global_step}", flush=True)
