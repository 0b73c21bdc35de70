"""A rank of `python -m benchmarks.flight_recorder`."""

import importlib
import json
import pickle
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def rank(steps: int) -> None:
    """Train, then print what was measured."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(4)]
    model = nn.Sequential(*layers)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, took = torch.randn(32, 256), []
    first, worked = steps // 3, 0.0
    for number in range(steps):
        if number == first:
            worked = time.process_time()
        begun = time.perf_counter()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        took.append(time.perf_counter() - begun)
    work_s = (time.process_time() - worked) / (steps - first)
    begun = time.perf_counter()
    recorder: Any = importlib.import_module("torch._C._distributed_c10d")
    dump = recorder._dump_fr_trace(True, False, False)
    dump_s = time.perf_counter() - begun
    ops = len(pickle.loads(dump).get("entries", ()))
    found = {"step_s": statistics.median(took[first:]), "work_s": work_s, "dump_s": dump_s}
    print(json.dumps({**found, "bytes": len(dump), "ops": ops}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    rank(int(sys.argv[1]))
