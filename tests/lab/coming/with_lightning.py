"""As in Lightning's guide: a module and a Trainer that is told the number of nodes."""

import os

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = lightning.Trainer(
    accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]), strategy="ddp", max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
trainer.fit(Model(), DataLoader(data, batch_size=4))
print(f"lightning {trainer.global_rank} of {trainer.world_size} steps {trainer.global_step}",
      flush=True)  # fmt: skip
