"""A stranger's script: DDP, its own checkpoint, nothing of ndctl."""

# ruff: noqa: T201 (a script that a user runs)
import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
first = 0
if args.out.exists():
    kept = torch.load(args.out)
    model.load_state_dict(kept["model"])
    first = kept["step"]
for step in range(first, args.steps):
    torch.manual_seed(1000 * step + rank)
    loss = (model(torch.randn(4, 8)) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step + 1} loss {loss.item():.6f}", flush=True)
        if (step + 1) % 10 == 0:
            torch.save(
                {"model": model.state_dict(), "step": step + 1}, args.out.with_suffix(".new")
            )
            args.out.with_suffix(".new").rename(args.out)
    time.sleep(0.1)
world = os.environ["WORLD_SIZE"]
print("argv", sys.argv[1:], "cwd", Path.cwd(), "WORLD_SIZE", world, flush=True)
dist.destroy_process_group()
