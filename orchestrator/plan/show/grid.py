"""The mesh drawn as host x device: a row for each host, in it the coordinates of its ranks."""

from orchestrator.contract.mesh import AXES
from orchestrator.contract.plan import Plan
from orchestrator.plan.show.tables import WIDTH, table

HOSTS_SHOWN = 12
"""Of a larger plan, the first few and the last are drawn."""
FIRST_SHOWN = 5


def grid(plan: Plan) -> list[str]:
    """Coordinates that are the same on all devices of a host stand before these."""
    axes = [axis for axis in AXES if getattr(plan.mesh, axis) > 1]
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
    said = f"; a device has {', '.join(inside)}" if inside else ""
    title = f"ranks      a row is a host, in it its devices{said}"
    lines = table(["host", "rank", *outside, *devices], rows)
    left = len(plan.hosts) - len(rows)
    if left:
        lines.insert(1 + FIRST_SHOWN, f"  … {left:,} more hosts")
    return [title, *(line[:WIDTH] for line in lines)]


def _varies(plan: Plan, axis: str) -> bool:
    """Whether ranks of one host differ in it."""
    place = AXES.index(axis)
    inner = 1
    for degree in plan.mesh.degrees[place + 1 :]:
        inner *= degree
    return inner % plan.ranks_per_host != 0


def _cell(plan: Plan, rank: int, axes: list[str]) -> str:
    coords = plan.mesh.coords(rank)
    return ",".join(str(coords[axis]) for axis in axes) or "*"


def _shown(plan: Plan) -> list[tuple[int, str]]:
    numbered = list(enumerate(plan.hosts))
    if len(numbered) <= HOSTS_SHOWN:
        return numbered
    return [*numbered[:FIRST_SHOWN], numbered[-1]]
