"""Plain DistributedDataParallel with all calls of `import ndctl`.

    ndctl run --hosts 2 --gpus-per-host 2 --follow -- examples/scripts/ddp.py
    torchrun --nproc-per-node 2 examples/scripts/ddp.py

It resumes at the step of the newest complete checkpoint, with the same losses as without the
failure: the checkpoint has the model, the optimizer, and the random state of each rank.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from byte_model import ByteModel, batch_of, read_text
from torch.nn.parallel import DistributedDataParallel

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
rank = dist.get_rank()
rng = torch.cuda if cuda else torch.random  # where dropout gets its random numbers

torch.manual_seed(1)  # the same weights on all ranks
# Without `find_unused_parameters`, DDP reorders its buckets after the first step of each process. A
# resumed process would then add the gradients of the ranks in another order, and its losses differ
# in the last digits.
model = DistributedDataParallel(ByteModel().to(device), find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank)  # another dropout on each rank
text = read_text()

first = 0
if (found := ndctl.latest_checkpoint()) is not None:
    state = torch.load(found / "model.pt", map_location=device)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]
    rng.set_rng_state(torch.load(found / f"rank-{rank}.pt"))

for step in range(first + 1, args.steps + 1):
    loss = model(batch_of(text, step, rank).to(device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ndctl.log(step, loss=loss.item())
    stop = ndctl.should_stop()
    if stop or step % args.save_every == 0 or step == args.steps:
        with ndctl.checkpoint(step) as folder:
            torch.save(rng.get_rng_state(), folder / f"rank-{rank}.pt")
            if rank == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({"step": step, **state}, folder / "model.pt")
    if stop:
        break
    time.sleep(args.pause)
dist.destroy_process_group()
