"""A plan for people and for scripts."""

from collections.abc import Iterator
from typing import Any

from orchestrator.contract.codec import encode
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import Choice, ModelWork, Plan, SpeedCorrection, StepTime, places
from orchestrator.inventory.software import software_basis
from orchestrator.plan.decision import Decision
from orchestrator.plan.figures import (
    show_amount,
    show_bytes,
    show_flops,
    show_seconds,
    show_traffic,
    three_digits,
)
from orchestrator.plan.show.bars import bars
from orchestrator.plan.show.decision import decision_json, describe_decision
from orchestrator.plan.show.grid import grid
from orchestrator.plan.show.tables import labelled, table, wrapped
from orchestrator.plan.show.traffic import describe_traffic

BAR = 30
SURE = 0.95
"""A plan is said to fit if it does with at least this share of the published allocators."""


def describe_plan(plan: Plan, decision: Decision | None = None) -> str:
    """`plan` as plain text: mesh, speed, memory, traffic, ranks, alternatives, rejected meshes."""
    sections = [
        labelled("WARNING", cannot_train(plan)) if plan.untrainable else [],
        _split(plan),
        _speed(plan),
        describe_decision(decision) if decision is not None else [],
        _memory(plan),
        describe_traffic(plan),
        grid(plan),
        _placement(plan),
        _alternatives(plan),
        _rejected(plan),
        [line for note in (*prices_of(plan), *plan.notes) for line in wrapped(note, "- ", "  ")],
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def cannot_train(plan: Plan) -> str:
    return (
        f"{plan.untrainable}. ndctl submit refuses this job; the plan is for a program of your own"
        " (ndctl run)"
    )


def plan_json(plan: Plan, decision: Decision | None = None) -> dict[str, Any]:
    """`plan` as `ndctl plan --json` prints it."""
    found = {} if decision is None else {"decision": decision_json(decision)}
    return {
        "mesh": encode(plan.mesh),
        "world_size": plan.world_size,
        "micro_batch_size": plan.micro_batch_size,
        "gradient_accumulation": plan.gradient_accumulation,
        "activation_checkpointing": plan.activation_checkpointing,
        "reshard_after_forward": plan.reshard_after_forward,
        "reduce_gradients": plan.reduce_gradients,
        "compile": plan.compile,
        "float8": plan.float8,
        "loss_chunks": plan.loss_chunks,
        "schedule": plan.schedule,
        "methods": dict(plan.methods),
        "profile": plan.profile,
        "software": None if plan.software is None else encode(software_basis(plan.software)),
        "hosts": list(plan.hosts),
        "placement": None if plan.placement is None else encode(plan.placement),
        "ranks": [encode(one) for one in places(plan, plan.hosts)],
        "memory": encode(plan.memory),
        "memory_along_pp": encode(plan.memory_along_pp),
        "time": None if plan.time is None else encode(plan.time),
        "work": None if plan.work is None else encode(plan.work),
        "communication": encode(plan.communication),
        "alternatives": encode(plan.alternatives),
        "comparison": plan.comparison,
        "untrainable": plan.untrainable,
        "prices": encode(plan.prices),
        "rejected": encode(plan.rejected),
        "notes": list(plan.notes),
        **found,
    }


def _split(plan: Plan) -> list[str]:
    hosts = f"{len(plan.hosts):,} host{'s' if len(plan.hosts) > 1 else ''} x {plan.ranks_per_host}"
    ranks = f" = {plan.world_size:,} ranks" if plan.world_size > 1 else ""
    of = f" of {plan.profile}" if plan.profile else ""
    if plan.memory is None:
        return labelled("ranks", f"{plan.world_size:,} on {hosts}{of}, which run your own program")
    parallel, micro, times = (
        plan.mesh.data_parallel,
        plan.micro_batch_size,
        plan.gradient_accumulation,
    )
    assert micro is not None
    assert times is not None
    total = parallel * micro * times
    batch = (
        f"{total:,} sequence{'s' * (total > 1)} per step = {parallel:,} data-parallel"
        f" rank{'s' * (parallel > 1)} x micro batch {micro} x {times} accumulated"
    )
    return [
        *labelled("mesh", f"{plan.mesh}{ranks} on {hosts}{of}"),
        *labelled("batch", batch),
        *(line for what, said in plan.methods.items() for line in labelled(what, said)),
        *labelled("recompute", _recompute(plan)),
    ]


def _recompute(plan: Plan) -> str:
    return {
        "none": "none: all activations are kept",
        "gathers": "gathers: all activations are kept, and gathered inputs are gathered again",
        "elementwise": "elementwise: results of matrix products and of attention are kept",
        "selective": "selective: results of attention and of every second product are kept",
        "full": "full: every layer, from its input",
        "every_k": "every_k: every k-th layer, from its input",
    }[plan.activation_checkpointing]


def _speed(plan: Plan) -> list[str]:
    time = plan.time
    if time is None:
        return []
    head = (
        f"{show_seconds(time.step_s)} per step, {three_digits(time.tokens_per_second_per_device)}"
        f" tokens/s per device, {time.mfu:.1%} MFU"
        # Its products are up to twice as fast as those of the peak that the figure is relative to.
        + (" of the peak without float8" if plan.float8 else "")
    )
    longest = max(time.parts.values(), default=1.0)
    rows = [
        [part, show_seconds(seconds), f"{seconds / time.step_s:.1%}", _bar(seconds / longest)]
        for part, seconds in time.parts.items()
    ]
    lines = table(["", "", "", ""], [[*row[:3], ""] for row in rows])[1:]
    return [
        *labelled("speed", head),
        *(labelled("software", software_of(plan.software)) if plan.software else ()),
        *labelled("accuracy", _accuracy(time)),
        *(labelled("history", history_of(time.correction)) if time.correction else ()),
        *(labelled("work", _work(plan.work, "adapters" in plan.methods)) if plan.work else ()),
        *(f"{line:<38}{row[3]}".rstrip() for line, row in zip(lines, rows, strict=True)),
    ]


def software_of(name: str) -> str:
    used = software_basis(name)
    return (
        f"{used.name}: times are for it, memory is that of the bundled trainer; {used.runs}"
        f" published runs of {used.sources} sources are planned {used.mean_error:.1%} off in the"
        f" mean (bias {used.bias:+.1%}, worst {used.worst:+.1%})"
    )


def _accuracy(time: StepTime) -> str:
    if time.tokens_per_second_per_device_range is None:
        return time.confidence
    low, high = map(three_digits, time.tokens_per_second_per_device_range)
    return f"{low} to {high} tokens/s per device: {time.confidence}"


def history_of(used: SpeedCorrection) -> str:
    jobs = f"{used.jobs} earlier job{'s' if used.jobs > 1 else ''}"
    return (
        f"measured speed of {jobs} of {used.family} on {used.profile}: planned"
        f" x{used.factor:.2f}; the range follows; without it: --no-history"
    )


def _work(work: ModelWork, adapters: bool) -> str:
    said = f"{show_flops(work.flops)} per step, {show_amount(work.parameters)} parameters"
    if not work.recomputed_flops:
        return said
    share = f"{work.recomputed_flops / work.flops:.1%}"
    if not adapters:  # without gradients of frozen weights a forward pass is a larger share
        share += " (a whole forward pass is 33.3%)"
    return f"{said}; recomputation {show_flops(work.recomputed_flops)} more, {share}"


def _bar(share: float) -> str:
    return "#" * round(BAR * share)


def _memory(plan: Plan) -> list[str]:
    memory = plan.memory
    if memory is None:
        return []
    where = "" if memory.worst_rank == "every rank" else f", {memory.worst_rank}"
    limit = "" if memory.device_bytes is None else f" of {show_bytes(memory.device_bytes)}"
    lines = labelled(
        "memory", f"about {show_bytes(memory.peak_bytes)}{limit} on the fullest rank{where}"
    )
    if memory.peak_bytes_range:
        low, high = map(show_bytes, memory.peak_bytes_range)
        # A plan of an earlier version does not say it.
        basis = f": {memory.basis}" if memory.basis else ""
        lines += labelled("", f"{low} to {high}{basis}")
    if memory.fits is not None:
        lines += labelled("", _fits(memory.fits))
    lines += bars(plan.memory_along_pp or [memory])
    if memory.host:
        items = ", ".join(f"{item} {show_bytes(size)}" for item, size in memory.host.items())
        lines += wrapped(f"in the host's memory, per rank: {items}", "  ", "  ")
    return lines


def _fits(share: float) -> str:
    if share >= SURE:
        return "fits"
    said = f"with {share:.0%} of the published allocators"
    return f"likely fits: {said}" if share >= 0.5 else f"may not fit: only {said}"


OUT_OF = {"nvlink block": "an NVLink block", "leaf": "a leaf switch"}


def _placement(plan: Plan) -> list[str]:
    cost = plan.placement
    if cost is None:
        return []
    rows = [
        [
            f"out of {OUT_OF.get(level, f'a {level}')}",
            show_traffic(ours),
            show_traffic(by_name),
            f"{ours / by_name - 1:+.1%}" if by_name else "",
        ]
        for level, ours, by_name in zip(cost.levels, cost.crossing, cost.by_name, strict=False)
    ]
    head = ["", "as placed", "in name order", ""]
    return [*labelled("placement", "what all ranks send per step"), *table(head, rows)]


def _alternatives(plan: Plan) -> list[str]:
    best = plan.choice
    if not plan.alternatives or best is None:
        return []
    rows = [choice_row(one, best) for one in (best, *plan.alternatives)]
    said = "the best plan of each other kind of mesh; the first line is the plan"
    lines = [*labelled("alternatives", said), *table(CHOICE_HEAD, rows, left=4)]
    return lines + (wrapped(plan.comparison, "  ", "  ") if plan.comparison else [])


def prices_of(plan: Plan) -> Iterator[str]:
    """What fixed keys cost, and how to free them."""
    for price in plan.prices:
        fixed = " and ".join(f"{path}={value}" for path, value in price.fixed.items())
        edits = " ".join(f"--set {path}={value}" for path, value in price.edits.items())
        numbers = "; it changes the number format of products" if price.changes_numbers else ""
        cost = f"cost{'s' if len(price.fixed) == 1 else ''} {price.share:.0%}"
        then = f"{show_seconds(price.choice.step_s)} a step with {edits} ({price.choice.mesh})"
        yield f"{fixed} {cost}: {then}{numbers}"


CHOICE_HEAD = ["mesh", "micro", "recompute", "schedule", "step", "MFU", "memory", "slower"]


def choice_row(choice: Choice, best: Choice) -> list[str]:
    slower = choice.step_s / best.step_s - 1
    return [
        short(choice.mesh),
        f"{choice.micro_batch_size} x {choice.gradient_accumulation}",
        choice.activation_checkpointing
        + (", ZeRO-2" if choice.reshard_after_forward is False else "")
        + _compiled(choice, best),
        choice.schedule or "-",
        show_seconds(choice.step_s),
        f"{choice.mfu:.1%}",
        show_bytes(choice.peak_bytes),
        "" if choice is best else f"{slower:+.1%}",
    ]


def _compiled(choice: Choice, best: Choice) -> str:
    if choice.compile == best.compile:
        return ""
    return ", compiled" if choice.compile else ", eager"


def short(mesh: Mesh) -> str:
    """Short axis names, for tables."""
    names = {"pp": "pp", "dp_replicate": "rep", "dp_shard": "shard", "cp": "cp", "tp": "tp"}
    shown = [f"{name}{getattr(mesh, a)}" for a, name in names.items() if getattr(mesh, a) > 1]
    return " ".join(shown) or "1 rank"


def _rejected(plan: Plan) -> list[str]:
    if not plan.rejected:
        return []
    total = sum(one.count for one in plan.rejected) + len(plan.alternatives) + 1
    ways = f"of {total:,} ways to multiply the degrees to {plan.world_size:,} ranks"
    lines = labelled("rejected", ways)
    wide = max(len(f"{one.count:,}") for one in plan.rejected)
    for one in sorted(plan.rejected, key=lambda one: -one.count):
        first = f"  {one.count:>{wide},}  "
        lines += wrapped(f"{one.family}: {one.constraint}", first, " " * len(first))
    return lines
