"""Samples of a machine whose constants are known: the cost model itself computes the seconds."""

from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.contract.messages.measurements import Measurements, Sample
from orchestrator.inventory.profile import Fabric, Profile
from orchestrator.plan.cost.kernels import attention_s, matmul_s, move_s
from orchestrator.plan.cost.machine import Machine, machine_of

CPU_PRODUCTS = ((512, 512, 64), (512, 512, 256), (512, 512, 1024), (1024, 256, 256))
GPU_PRODUCTS = ((8192, 8192, 8192), (8192, 4096, 1024), (2048, 4096, 4096))
MIB = 1 << 20
OPERATIONS = 128


def sample(what: str, size: Mapping[str, int], seconds: float, **more: Any) -> Sample:
    return Sample(
        what=what,
        size=size,
        seconds=seconds,
        low=0.97 * seconds,
        high=1.05 * seconds,
        repeats=50,
        **more,
    )


def measured(profile: Profile, hosts: int = 1, ranks: int = 4, **more: Any) -> Measurements:
    """What `ndctl calibrate` would measure on hosts of `profile`."""
    fabric = Fabric(profile=profile, hosts=hosts, devices_per_host=ranks)
    machine = machine_of(fabric)
    samples = [*_compute(machine, profile), *_collectives(machine, hosts, ranks)]
    values: dict[str, Any] = {
        "device": profile.device,
        "device_name": "NVIDIA H100 80GB HBM3" if profile.device == "cuda" else "cpu",
        "memory_bytes": profile.memory_bytes if profile.device == "cuda" else None,
        "hosts": hosts,
        "ranks_per_host": ranks,
        "torch": "2.13.0",
        "samples": tuple(samples),
        "processors": 8,
    }
    return Measurements(**values | more)


def _compute(machine: Machine, profile: Profile) -> Iterator[Sample]:
    products = GPU_PRODUCTS if profile.device == "cuda" else CPU_PRODUCTS
    for kind in ("float32", "bfloat16"):
        for rows, columns, inner in products:
            size = {"rows": rows, "columns": columns, "inner": inner}
            seconds = matmul_s(machine, rows, columns, inner, kind)
            yield sample("product", size, seconds, kind=kind)
    for head, tokens in ((128, 256), (128, 1024), (128, 4096), (64, 4096)):
        pairs, width = tokens * tokens / 2, 8 * head
        both = attention_s(machine, pairs, width, head, tokens, tokens)
        size = {"tokens": tokens, "sequences": 1, "heads": 8, "head": head}
        for way, seconds in zip(("forward", "backward"), both, strict=True):
            yield sample(f"attention {way}", size, seconds - machine.calibration.gap_s)
    yield sample("activation", {"bytes": 96 * MIB}, move_s(machine, 96 * MIB))
    copied = 64 * MIB / (0.9 * profile.memory_bytes_per_s)
    yield sample("copy", {"bytes": 64 * MIB}, copied)
    each = machine.calibration.gap_s if profile.device == "cpu" else 5e-6
    yield sample("small operations", {"operations": OPERATIONS}, OPERATIONS * each)
    if profile.device == "cuda":
        for way in ("to the device", "to the host"):
            yield sample(f"copy {way}", {"bytes": 64 * MIB}, 64 * MIB / 40e9)


def _collectives(machine: Machine, hosts: int, ranks: int) -> Iterator[Sample]:
    for across, count, stride in ((False, ranks, 1), (True, hosts, ranks)):
        if count < 2:
            continue
        wire = machine.wire(count, stride)
        for size in (16 << 10, 256 << 10, 2 * MIB, 64 * MIB):
            for what in ("all-gather", "reduce-scatter"):
                seconds = wire.gather_s(size)
                yield sample(what, {"bytes": size}, seconds, ranks=count, across=across)
