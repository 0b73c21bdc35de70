"""Plain FSDP2 (`fully_shard`) with sharded checkpoints of torch.distributed.checkpoint (DCP).

    ndctl run --hosts 2 --gpus-per-host 2 --follow -- examples/scripts/fsdp2.py
    torchrun --nproc-per-node 2 examples/scripts/fsdp2.py

DCP writes `__R_0.distcp` on rank R and `.metadata` on rank 0. `ndctl.checkpoint` gives each rank a
folder of its own and puts the files together at the end, so DCP loads the folder as if all ranks
had written into it, also on another number of ranks.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from byte_model import ByteModel, batch_of, read_text
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ndctl

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--save-every", type=int, default=20)
parser.add_argument("--pause", type=float, default=0.0, help="seconds per step, to watch it")
args = parser.parse_args()

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(1)  # the same weights on all ranks, before they are sharded
model = ByteModel().to(device)
mesh = init_device_mesh(device.type, (world_size,))
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = read_text()

first = 0
if (found := ndctl.latest_checkpoint()) is not None:
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=found)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    first = state["step"]

for step in range(first + 1, args.steps + 1):
    torch.manual_seed(1_000_003 * step + rank)  # dropout depends on step and rank alone
    loss = model(batch_of(text, step, rank).to(device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach()
    dist.all_reduce(total)
    ndctl.log(step, loss=total / world_size)
    stop = ndctl.should_stop()
    if stop or step % args.save_every == 0 or step == args.steps:
        with ndctl.checkpoint(step) as folder:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=folder)
    if stop:
        break
    time.sleep(args.pause)
dist.destroy_process_group()
