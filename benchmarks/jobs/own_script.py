"""A user's training script for the benchmarks: a llama with DDP and the whole contract of
`import ndctl`, on GPUs if there are any.

    torchrun --nproc-per-node 2 benchmarks/jobs/own_script.py --out FOLDER

Rank 0 appends a line per step to FOLDER/steps.jsonl; each rank writes its process id there.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import ndctl

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=100_000)
parser.add_argument("--save-every", type=int, default=10)
parser.add_argument("--hidden", type=int, default=128)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--length", type=int, default=128)
args = parser.parse_args()

local = int(os.environ["LOCAL_RANK"])
cuda = torch.cuda.is_available()
# Ranks that share a GPU cannot use NCCL.
shared = cuda and int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count()
dist.init_process_group("gloo" if shared or not cuda else "nccl")
device = torch.device("cuda", local % torch.cuda.device_count()) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
rank = dist.get_rank()
args.out.mkdir(parents=True, exist_ok=True)
(args.out / f"rank-{rank}.pid").write_text(str(os.getpid()))

torch.manual_seed(1)
config = LlamaConfig(
    vocab_size=4096,
    hidden_size=args.hidden,
    intermediate_size=4 * args.hidden,
    num_hidden_layers=args.layers,
    num_attention_heads=max(2, args.hidden // 64),
    num_key_value_heads=max(2, args.hidden // 64),
)
llama: torch.nn.Module = LlamaForCausalLM(config)
model = DistributedDataParallel(llama.to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
first = 0
if (found := ndctl.latest_checkpoint()) is not None:
    kept = torch.load(found / "state.pt", map_location=device)
    model.module.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    first = kept["step"]

with (args.out / "steps.jsonl").open("a") as lines:
    for step in range(first + 1, args.steps + 1):
        torch.manual_seed(1000 * step + rank)
        tokens = torch.randint(4096, (args.batch, args.length), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        ndctl.log(step, loss=value)
        if rank == 0:
            line = {"step": step, "loss": value, "time": time.time(), "attempt": ndctl.attempt}
            lines.write(json.dumps(line) + "\n")
            lines.flush()
        stop = ndctl.should_stop()
        if stop or step % args.save_every == 0:
            begun = time.time()
            with ndctl.checkpoint(step) as folder:
                if rank == 0:
                    state = {"model": model.module.state_dict(), "step": step}
                    state["optimizer"] = optimizer.state_dict()
                    torch.save(state, folder / "state.pt")
            if rank == 0:
                with (args.out / "saves.jsonl").open("a") as saves:
                    saves.write(json.dumps({"step": step, "took_s": time.time() - begun}) + "\n")
        if stop:
            break
dist.destroy_process_group()
