"""A plan for people and for scripts."""

from typing import Any

from orchestrator.contract.codec import encode
from orchestrator.contract.mesh import AXES
from orchestrator.contract.plan import Plan, RankPlace, places
from orchestrator.plan.memory.peak import show_bytes

HOSTS_SHOWN = 16
"""Of a larger plan, the first few and the last are drawn."""
FIRST_SHOWN = 6
BAR = 24


def describe_plan(plan: Plan) -> str:
    """`plan` as plain text: mesh, batch, memory, where each rank goes, and why."""
    sections = [
        f"mesh     {plan.mesh}{_ranks(plan)} on {_hosts(plan)}",
        f"batch    {_batch(plan)}",
        *_methods(plan),
        f"memory   about {show_bytes(plan.memory.peak_bytes)} on the fullest rank",
        *_memory(plan),
        *_offloaded(plan),
        "",
        *_grid(plan),
    ]
    if plan.notes:
        sections += ["", *(f"- {note}" for note in plan.notes)]
    return "\n".join(sections)


def plan_json(plan: Plan) -> dict[str, Any]:
    """`plan` as `ndctl plan --json` prints it."""
    return {
        "mesh": encode(plan.mesh),
        "world_size": plan.world_size,
        "micro_batch_size": plan.micro_batch_size,
        "gradient_accumulation": plan.gradient_accumulation,
        "activation_checkpointing": plan.activation_checkpointing,
        "methods": dict(plan.methods),
        "hosts": list(plan.hosts),
        "ranks": [encode(one) for one in places(plan, plan.hosts)],
        "memory": encode(plan.memory),
        "notes": list(plan.notes),
    }


def _ranks(plan: Plan) -> str:
    return f" = {plan.world_size} ranks" if plan.world_size > 1 else ""


def _hosts(plan: Plan) -> str:
    count = len(plan.hosts)
    return f"{count} host{'s' if count > 1 else ''} x {plan.ranks_per_host}"


def _batch(plan: Plan) -> str:
    parallel, micro, times = (
        plan.mesh.data_parallel,
        plan.micro_batch_size,
        plan.gradient_accumulation,
    )
    return (
        f"{parallel * micro * times} sequences a step = {parallel} data-parallel x"
        f" micro batch {micro} x {times} accumulated"
    )


def _methods(plan: Plan) -> list[str]:
    return [f"{what:<9}{method}" for what, method in plan.methods.items()]


def _offloaded(plan: Plan) -> list[str]:
    if not plan.memory.host:
        return []
    items = ", ".join(f"{item} {show_bytes(size)}" for item, size in plan.memory.host.items())
    return [f"  and in the host's memory for each rank: {items}"]


def _memory(plan: Plan) -> list[str]:
    peak = max(plan.memory.peak_bytes, 1)
    return [
        f"  {item:<12}{show_bytes(size):>9}  {'#' * round(BAR * size / peak)}".rstrip()
        for item, size in plan.memory.items.items()
    ]


def _grid(plan: Plan) -> list[str]:
    """One line a host: its ranks, each with its coordinates on the axes that split anything."""
    axes = [axis for axis in AXES if getattr(plan.mesh, axis) > 1]
    cells = [_cell(one, axes) for one in places(plan, plan.hosts)]
    wide, width = max(map(len, plan.hosts)), max(map(len, cells))
    lines = [f"ranks    rank({', '.join(axes)})" if axes else "ranks"]
    many = len(plan.hosts) > HOSTS_SHOWN
    for node, host in enumerate(plan.hosts):
        if many and FIRST_SHOWN <= node < len(plan.hosts) - 1:
            if node == FIRST_SHOWN:
                lines.append(f"  … {len(plan.hosts) - 1 - FIRST_SHOWN} more hosts")
            continue
        first = node * plan.ranks_per_host
        row = (cells[rank].ljust(width) for rank in range(first, first + plan.ranks_per_host))
        lines.append(f"  {host:<{wide}}  {'  '.join(row)}".rstrip())
    return lines


def _cell(one: RankPlace, axes: list[str]) -> str:
    return (
        f"{one.rank}({','.join(str(one.coords[axis]) for axis in axes)})" if axes else f"{one.rank}"
    )
