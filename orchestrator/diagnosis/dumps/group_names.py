"""Members of the process groups of a job of ndctl, for dumps that do not list them."""

from orchestrator.contract.mesh import AXES, Mesh


def axes_of(mesh: Mesh) -> dict[str, tuple[tuple[int, ...], ...]]:
    """torch's name of each axis -> members of its groups."""
    axes = {f"mesh_{axis}": _lines(mesh, (axis,)) for axis in AXES}
    for axis in ("dp_shard", "dp_replicate"):
        axes[f"mesh_{axis}_cp"] = _lines(mesh, (axis, "cp"))
    return {desc: lines for desc, lines in axes.items() if len(lines[0]) > 1}


def _lines(mesh: Mesh, along: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    lines: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world_size):
        coords = mesh.coords(rank)
        place = tuple(coords[axis] for axis in AXES if axis not in along)
        lines.setdefault(place, []).append(rank)
    return tuple(tuple(line) for line in lines.values())
