"""The map of ranks: a row per host, a column per device."""

from orchestrator.contract.mesh import AXES
from orchestrator.contract.plan import Plan
from orchestrator.plan.show.tables import WIDTH, labelled, table

HOSTS_SHOWN = 12
"""A larger plan shows the first few hosts and the last one."""
FIRST_SHOWN = 5


def grid(plan: Plan) -> list[str]:
    """Axes that do not vary inside a host get a column of their own before the devices."""
    axes = [] if plan.is_own else [axis for axis in AXES if getattr(plan.mesh, axis) > 1]
    inside = [axis for axis in axes if _varies(plan, axis)]
    outside = [axis for axis in axes if axis not in inside]
    devices = [str(device) for device in range(plan.ranks_per_host)]
    rows = [
        [
            host,
            f"{node * plan.ranks_per_host}",
            *(str(plan.mesh.coords(node * plan.ranks_per_host)[axis]) for axis in outside),
            *(
                _cell(plan, node * plan.ranks_per_host + device, inside)
                for device in range(plan.ranks_per_host)
            ),
        ]
        for node, host in _shown(plan)
    ]
    shown = f"; each device shows {', '.join(inside)}" if inside else ""
    title = labelled("ranks", f"one row per host, one column per device{shown}")
    lines = table(["host", "rank", *outside, *devices], rows)
    left = len(plan.hosts) - len(rows)
    if left:
        lines.insert(1 + FIRST_SHOWN, f"  … {left:,} more hosts")
    return [*title, *(line[:WIDTH] for line in lines)]


def _varies(plan: Plan, axis: str) -> bool:
    """Whether ranks of one host differ along `axis`."""
    place = AXES.index(axis)
    inner = 1
    for degree in plan.mesh.degrees[place + 1 :]:
        inner *= degree
    return inner % plan.ranks_per_host != 0


def _cell(plan: Plan, rank: int, axes: list[str]) -> str:
    if plan.is_own:
        return str(rank)
    coords = plan.mesh.coords(rank)
    return ",".join(str(coords[axis]) for axis in axes) or "*"


def _shown(plan: Plan) -> list[tuple[int, str]]:
    numbered = list(enumerate(plan.hosts))
    if len(numbered) <= HOSTS_SHOWN:
        return numbered
    return [*numbered[:FIRST_SHOWN], numbered[-1]]
