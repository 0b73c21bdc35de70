"""transformers' `Trainer`, without a line about ndctl.

    ndctl run --hosts 2 --gpus-per-host 2 --follow -- examples/scripts/transformers_trainer.py
    torchrun --nproc-per-node 2 examples/scripts/transformers_trainer.py

In ranks that ndctl starts, each Trainer has a callback of ndctl. It reports steps and metrics, and
saves a checkpoint and stops when the job is preempted or cancelled. `get_last_checkpoint` then
skips checkpoints whose write was interrupted.
"""

import argparse
import time
from pathlib import Path

import torch
from byte_model import batch_of, read_text
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--save-every", type=int, default=20)
parser.add_argument("--pause", type=float, default=0.0, help="seconds per step, to watch it")
parser.add_argument("--out", type=Path, default=Path("trainer_output"))
args = parser.parse_args()


class Text(Dataset):
    def __init__(self) -> None:
        self.text = read_text()

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        (tokens,) = batch_of(self.text, step=index, rank=0, size=1)
        if index % 8 == 0:
            time.sleep(args.pause)
        return {"input_ids": tokens, "labels": tokens}


settings = TrainingArguments(
    output_dir=str(args.out),
    max_steps=args.steps,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    logging_steps=1,
    save_steps=args.save_every,
    save_total_limit=2,
    # As in ddp.py: a resumed process adds gradients in the same order, so losses stay equal.
    ddp_find_unused_parameters=True,
    use_cpu=not torch.cuda.is_available(),
    disable_tqdm=True,
    report_to="none",
)
set_seed(settings.seed)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    attention_dropout=0.1,
)
trainer = Trainer(LlamaForCausalLM(config), settings, train_dataset=Text())
last = get_last_checkpoint(args.out) if args.out.exists() else None
trainer.train(resume_from_checkpoint=last)
