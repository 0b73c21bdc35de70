"""A script that keeps its state in the memory of the host after each step."""

import argparse
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ndctl

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--pause", type=float, default=0.1)
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Linear(32, 1)),
    find_unused_parameters=True,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
done = 0
found = ndctl.load_from_memory()
if found is not None:
    done, state = found
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
for step in range(done + 1, args.steps + 1):
    loss = (model(torch.randn(4, 8)) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    ndctl.log(step, loss=mean.item() / dist.get_world_size())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    ndctl.save_in_memory(step, {**state, "random": torch.get_rng_state()})
    time.sleep(args.pause)
dist.destroy_process_group()
