"""Trains with Lightning, which saves its own checkpoints: ``own_lightning.py FOLDER STEPS``."""

import os
import sys
import time
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def on_train_start(self) -> None:
        print(f"from step {self.global_step} of {self.trainer.world_size} ranks", flush=True)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        time.sleep(0.05)
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


folder = Path(sys.argv[1]) / "lightning"
keep = ModelCheckpoint(folder, every_n_train_steps=10, save_last=True, enable_version_counter=False)
trainer = lightning.Trainer(
    accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), strategy="ddp", max_steps=int(sys.argv[2]),
    logger=False, callbacks=[keep], enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
data = TensorDataset(torch.randn(512, 4), torch.randn(512, 1))
last = folder / "last.ckpt"
trainer.fit(Model(), DataLoader(data, batch_size=4), ckpt_path=last if last.exists() else None)
print(f"done {trainer.global_rank} of {trainer.world_size} steps {trainer.global_step}", flush=True)
