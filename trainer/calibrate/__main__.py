"""Measures this rank's device and its links, together with all other ranks.

    torchrun … -m trainer.calibrate OUT BUDGET_S

Rank 0 writes `Measurements` as JSON to the file OUT.
"""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from ndctl.rank.parent_death import die_with_parent
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.messages.measurements import Measurements, Sample
from trainer.calibrate.collectives import collective_tasks
from trainer.calibrate.compute import compute_tasks, product, sizes_of
from trainer.calibrate.repeat import Task, agree, measure, one_thread, seconds_of
from trainer.rank.devices import device_of, name_of
from trainer.rank.ranks import process_group

HOT_SHARE = 0.1
"""Share of the budget for products that heat the chip."""
REPEATS = 20
"""Products between two looks at the clock, and at both ends."""


def main(out: Path, budget_s: float, env: RankEnv) -> None:
    begun = time.monotonic()
    load = os.getloadavg()[0]
    with process_group(env), one_thread():
        device = device_of(env.local_rank, hidden=env.no_gpu)
        first, rest = compute_tasks(device)
        tasks = [*first, *collective_tasks(device, env.local_world_size), *rest]
        share_s = (1 - HOT_SHARE) * budget_s / len(tasks)
        found = [_measured(task, device, share_s, begun + budget_s) for task in tasks]
        samples = tuple(sample for sample in found if sample is not None)
        hot = heated(device, HOT_SHARE * budget_s) if device.type == "cuda" else None
        measurements = Measurements(
            device=device.type,
            device_name=name_of(device),
            memory_bytes=memory_of(device),
            hosts=env.world_size // env.local_world_size,
            ranks_per_host=env.local_world_size,
            torch=str(torch.__version__),
            samples=samples,
            missing=len(tasks) - len(samples),
            hot=hot,
            clock_mhz=asked(lambda: torch.cuda.clock_rate(device)),
            power_w=asked(lambda: torch.cuda.power_draw(device) / 1e3),
            load=load,
            processors=len(os.sched_getaffinity(0)),
        )
    if env.rank == 0:
        out.write_bytes(msgspec.json.encode(measurements))


def _measured(task: Task, device: torch.device, share_s: float, until: float) -> Sample | None:
    """None if the time is over. All ranks must agree on that."""
    if agree(time.monotonic() - until) > 0:
        return None
    return measure(task, device, share_s)


def heated(device: torch.device, seconds: float) -> float:
    """Speed of the first product after `seconds` of the same, relative to its first repetitions."""
    run = product(device, torch.bfloat16, *sizes_of(device).products[0])
    run()
    cool = seconds_of(run, device, REPEATS)
    until = time.monotonic() + seconds
    while agree(time.monotonic() - until) < 0:
        seconds_of(run, device, REPEATS)
    warm = seconds_of(run, device, REPEATS)
    return sorted(cool)[len(cool) // 2] / sorted(warm)[len(warm) // 2]


def memory_of(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory


def asked(question: Callable[[], float]) -> float | None:
    """None without a GPU, or without the package that asks its driver (nvidia-ml-py)."""
    if not torch.cuda.is_available():
        return None
    with suppress(ImportError, RuntimeError, OSError):
        return float(question())
    return None


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:  # noqa: TID251 (this is the entry point)
        # Otherwise ranks would outlive a torchrun that SIGKILL ended.
        die_with_parent(os.getppid())
    given = RankEnv.from_mapping(os.environ)  # noqa: TID251
    main(Path(sys.argv[1]), float(sys.argv[2]), given)
