"""Lightning's `Trainer.fit`, without a line about ndctl.

    ndctl run --hosts 2 --gpus-per-host 2 --follow -- examples/scripts/lightning_fit.py
    torchrun --nproc-per-node 2 examples/scripts/lightning_fit.py

In ranks that ndctl starts, each Trainer has a callback of ndctl. It reports steps and metrics, and
saves a checkpoint and stops when the job is preempted or cancelled. `ckpt_path="last"` resumes from
the newest checkpoint; for that, `dirpath` must be the same in each start.
"""

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import torch
from byte_model import ByteModel, batch_of, read_text
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, IterableDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--save-every", type=int, default=20)
parser.add_argument("--pause", type=float, default=0.0, help="seconds per step, to watch it")
parser.add_argument("--out", type=Path, default=Path("lightning_output"))
args = parser.parse_args()


class Text(IterableDataset):
    """The batches after a step. Lightning does not skip those that were trained before."""

    def __init__(self, done: int, rank: int) -> None:
        self.done, self.rank, self.text = done, rank, read_text()

    def __iter__(self) -> Iterator[torch.Tensor]:
        for step in range(self.done + 1, args.steps + 1):
            time.sleep(args.pause)
            yield batch_of(self.text, step, self.rank)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = ByteModel()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Text(self.trainer.global_step, self.global_rank), batch_size=None)

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        # A checkpoint of Lightning has no random state, so dropout depends on step and rank alone.
        torch.manual_seed(1_000_003 * self.trainer.global_step + self.global_rank)
        return self.model(tokens)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


pl.seed_everything(1)
trainer = pl.Trainer(
    max_steps=args.steps,
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
    accelerator="auto",
    # As in ddp.py: a resumed process adds gradients in the same order, so losses stay equal.
    strategy=DDPStrategy(find_unused_parameters=True),
    callbacks=[ModelCheckpoint(args.out, every_n_train_steps=args.save_every, save_last=True)],
    log_every_n_steps=1,
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(Module(), ckpt_path="last")
