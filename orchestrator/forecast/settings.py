"""Builds the input of a forecast from a spec, its plan and assumptions."""

import math
from collections.abc import Mapping
from typing import Annotated

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.contract.checkpoint_interval import (
    MEMORY_ON_CPU,
    MEMORY_ON_GPU,
    Interval,
    interval_of,
    memory_steps,
)
from orchestrator.contract.devices import CPU
from orchestrator.contract.plan import Plan
from orchestrator.contract.spec.job_spec import NOT_ON_GPUS, JobSpec
from orchestrator.contract.spec.limits import Above, AtLeast
from orchestrator.detect.heartbeat_monitor import HANG_SLACK_S, HANG_STEPS
from orchestrator.forecast.rates import DAY_S, Detected, Rates
from orchestrator.forecast.setting import Hazard, MemoryTier, Setting

STORAGE_PER_HOST = 1e9
"""Bytes per second and host that storage accepts; an assumption."""
COPY_BYTES_PER_S = 20e9
"""Copy rate from a device to host memory, out of the 25 GB/s of PCIe 4 x16 after headers."""
START_S = 120.0
"""Seconds to stop ranks, start processes, import, rendezvous and run the first step; assumed."""
REPAIR_H = 24.0
"""Mean repair time of a host; assumed."""
QUEUE_S = 600.0
"""Seconds until the scheduler grants a free host; assumed."""
SEND_BYTES_PER_S = 4e9
"""Bytes per second that a host sends to partners: its agent's four threads encrypt 1 GB/s each."""
LEAST_LOST_STEPS = 1.0
"""Steps that a failure costs on average at least, however fast copies are. A copy counts once those
of all ranks are complete, and a killed host cost a step in the median (docs/recover.md)."""
UNCOVERED = 0.05
"""Share of the failures that leave no complete checkpoint in memory, as a lost power supply of
several hosts or a requeue; assumed."""
EXIT_S = 2.0
"""Seconds until ndctl detects that a rank ended (benchmarks/results/measurements.md)."""


class Assumptions(Struct, frozen=True, kw_only=True):
    """What spec, plan and inventory do not say. None: computed, or one of the assumptions above."""

    rates: Rates
    days: Annotated[float, Above(0)] = 90.0
    storage_bytes_per_s: float | None = None
    stall_s: float | None = None
    restart_s: float | None = None
    repair_h: float = REPAIR_H
    queue_s: float = QUEUE_S
    hosts_there: Annotated[int, AtLeast(1)] | None
    """Hosts that the job can use. None: local jobs, which always have the hosts they request."""


class Basis(Struct, frozen=True, kw_only=True):
    """A setting, with the source of its numbers."""

    setting: Setting
    step_s: float
    checkpoint_bytes: int
    spares_asked: int
    """Number of spares that the spec requests. The setting has the number available."""
    notes: Mapping[str, str]
    """Assumption -> its value and source, as text."""


def basis_of(spec: JobSpec, plan: Plan, around: Assumptions) -> Basis:
    """Requires a plan with a predicted step time."""
    assert plan.time is not None
    hosts, step_s = len(plan.hosts), plan.time.step_s
    total, fullest = checkpoint_bytes(plan)
    given = around.storage_bytes_per_s
    storage = given or STORAGE_PER_HOST * hosts
    write_s = total / storage
    copy_s = around.stall_s if around.stall_s is not None else fullest / COPY_BYTES_PER_S
    memory = _memory_of(spec, plan, around, copy_s, step_s)
    stall_s = min(copy_s, write_s) if spec.checkpoint.async_ else write_s
    if memory is not None and spec.checkpoint.async_ and memory.interval_s <= step_s:
        stall_s = 0.0  # it is written from the copy that this step makes anyway
    loaded_s = total * plan.mesh.dp_replicate / storage
    restart_s = around.restart_s if around.restart_s is not None else START_S + loaded_s
    asked, there = spec.cluster.spare_hosts, around.hosts_there
    beside = asked if there is None else max(0, there - hosts)
    spares = min(asked, beside)
    setting = Setting(
        hosts=hosts,
        spares=spares,
        reserve=beside - spares,
        horizon_s=around.days * DAY_S,
        hazards=_covered(_hazards(spec, around.rates, hosts, step_s), memory, spec),
        interval_s=spec.checkpoint.every_steps * step_s,
        stall_s=stall_s,
        write_s=write_s,
        restart_s=restart_s,
        repair_s=around.repair_h * 3600,
        queue_s=around.queue_s,
        memory=memory,
    )
    every = _interval_of(setting) if spec.checkpoint.every == "auto" else None
    if every is not None:
        steps = max(1, round(every.seconds / step_s))
        setting = replace(setting, interval_s=steps * step_s)
    notes = {
        **({"hosts": "simulated on this machine, including spares"} if there is None else {}),
        **({} if every is None else {"interval": _interval_words(every)}),
        "storage": f"{storage / 1e9:,.4g} GB/s" + ("" if given else ", assumed (--storage GB/S)"),
        "stall": _stall_words(spec, around),
        "restart": "given"
        if around.restart_s is not None
        else f"{START_S:.0f} s assumed, plus loading a checkpoint (--restart SECONDS)",
        **_memory_words(spec, memory),
        "repair": f"{around.repair_h:g} h on average (--repair HOURS)",
        "queue": f"{around.queue_s:g} s on average (--queue SECONDS)",
    }
    return Basis(
        setting=setting, step_s=step_s, checkpoint_bytes=total, spares_asked=asked, notes=notes
    )


def _memory_of(
    spec: JobSpec, plan: Plan, around: Assumptions, copy_s: float, step_s: float
) -> MemoryTier | None:
    cpu = plan.profile == CPU
    wanted = spec.checkpoint.memory.on_devices(cpu=cpu).on_hosts(spec.cluster.hosts)
    if wanted.every == "off":
        return None
    if isinstance(wanted.every, int):
        steps = wanted.every
    else:
        steps = memory_steps(copy_s, step_s, MEMORY_ON_CPU if cpu else MEMORY_ON_GPU)
    _, fullest = checkpoint_bytes(plan)
    sent = fullest * plan.ranks_per_host * wanted.copies
    limit = SEND_BYTES_PER_S
    if wanted.copy_mib_per_s is not None:
        limit = min(limit, wanted.copy_mib_per_s * 2**20)
    # The next copy is sent to partners when the one before has arrived.
    interval_s = step_s * max(steps, math.ceil(sent / limit / step_s))
    return MemoryTier(
        interval_s=interval_s,
        stall_s=copy_s,
        lag_s=max(copy_s + sent / limit, LEAST_LOST_STEPS * step_s - interval_s / 2),
        restart_s=around.restart_s if around.restart_s is not None else START_S,
    )


def _covered(
    hazards: tuple[Hazard, ...], memory: MemoryTier | None, spec: JobSpec
) -> tuple[Hazard, ...]:
    """Each unplanned hazard in two parts: after most failures ranks resume from memory."""
    if memory is None:
        return hazards
    partners = spec.checkpoint.memory.on_hosts(spec.cluster.hosts).copies > 0
    split: list[Hazard] = []
    for hazard in hazards:
        if hazard.planned or (hazard.takes_host and not partners):
            split.append(hazard)
            continue
        split.append(replace(hazard, per_s=(1 - UNCOVERED) * hazard.per_s, covered=True))
        split.append(replace(hazard, per_s=UNCOVERED * hazard.per_s))
    return tuple(split)


def _memory_words(spec: JobSpec, memory: MemoryTier | None) -> dict[str, str]:
    every = spec.checkpoint.memory.every
    if memory is None:
        return {} if every == "off" else {"memory": f"no checkpoints in memory: {NOT_ON_GPUS}"}
    words = (
        f"{UNCOVERED:.0%} of the failures leave no checkpoint in memory, assumed; a host sends at"
        f" most {SEND_BYTES_PER_S / 1e9:g} GB/s to partners"
    )
    if every == "auto":
        words += "; hosts have the memory, assumed (checkpoint.memory.every=auto)"
    return {"memory": words}


def _interval_of(setting: Setting) -> Interval:
    """The interval that `checkpoint.every: auto` reaches when it knows how often the job fails."""
    read = sum(hazard.per_s for hazard in setting.unplanned if not hazard.covered)
    return interval_of(setting.stall_s, setting.write_s, 1 / read)


def _interval_words(every: Interval) -> str:
    bound = f"; bounded: {every.bound}" if every.bound else ""
    return (
        "the interval that checkpoint.every: auto reaches with these rates and this cost of a"
        f" save{bound}"
    )


def _stall_words(spec: JobSpec, around: Assumptions) -> str:
    if around.stall_s is not None:
        return "given"
    if not spec.checkpoint.async_:
        return "as long as the save (checkpoint.async is false)"
    return f"a copy to the host at {COPY_BYTES_PER_S / 1e9:g} GB/s, assumed (--stall SECONDS)"


def checkpoint_bytes(plan: Plan) -> tuple[int, int]:
    """Bytes of all files of a checkpoint, and of the rank that writes most.

    Replicas hold the same data, which is written once. A pipeline stage writes its own part.
    """
    stages = plan.memory_along_pp or (plan.needs,)
    each = [memory.host.get("checkpoint", 0) for memory in stages]
    per_stage = plan.world_size // plan.mesh.dp_replicate // len(each)
    return sum(each) * per_stage, max(each)


def _hazards(spec: JobSpec, rates: Rates, hosts: int, step_s: float) -> tuple[Hazard, ...]:
    hang = spec.resilience.hang_timeout
    seconds: Mapping[Detected, float] = {
        "exit": EXIT_S,
        "host": spec.resilience.agent_timeout,
        "hang": HANG_STEPS * step_s + HANG_SLACK_S if hang == "auto" else hang,
        "planned": 0.0,
    }
    return hazards_of(rates, hosts, seconds)


def hazards_of(rates: Rates, hosts: int, seconds: Mapping[Detected, float]) -> tuple[Hazard, ...]:
    """Failures of `hosts` hosts together. `seconds`: time to detection for each way to detect."""
    return tuple(
        Hazard(
            name=one.name,
            per_s=hosts * rates.per_host_s(one),
            detection_s=seconds[one.detected],
            takes_host=one.host == "leaves",
            planned=one.detected == "planned",
        )
        for one in rates.classes
    )
