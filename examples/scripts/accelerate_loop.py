"""A training loop with Hugging Face Accelerate, and all calls of `import ndctl`.

    ndctl run --hosts 2 --gpus-per-host 2 --follow -- examples/scripts/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/scripts/accelerate_loop.py

`save_state` writes the model and the optimizer on rank 0, and the random state on each rank.
`ndctl.checkpoint` gives each rank a folder of its own and puts the files together at the end, so
`load_state` finds them as if all ranks had written into one folder.
"""

import argparse
import time

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from byte_model import ByteModel, batch_of, read_text

import ndctl

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--save-every", type=int, default=20)
parser.add_argument("--pause", type=float, default=0.0, help="seconds per step, to watch it")
args = parser.parse_args()

# As in ddp.py: a resumed process adds gradients in the same order, so losses stay equal.
same_order = DistributedDataParallelKwargs(find_unused_parameters=True)
accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[same_order])
set_seed(1)
model = ByteModel()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
set_seed(1, device_specific=True)  # another dropout on each rank
text, rank = read_text(), accelerator.process_index

first = 0
if (found := ndctl.latest_checkpoint()) is not None:
    accelerator.load_state(found)
    first = int(found.name.removeprefix("step-"))

for step in range(first + 1, args.steps + 1):
    loss = model(batch_of(text, step, rank).to(accelerator.device))
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    ndctl.log(step, loss=accelerator.reduce(loss.detach(), "mean"))
    stop = ndctl.should_stop()
    if stop or step % args.save_every == 0 or step == args.steps:
        with ndctl.checkpoint(step) as folder:
            accelerator.save_state(folder)
    if stop:
        break
    time.sleep(args.pause)
accelerator.end_training()
