"""The process groups of a job of ours, where its dumps do not name their members."""

from orchestrator.contract.mesh import AXES, Mesh


def axes_of(mesh: Mesh) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The groups of a mesh as torch names them, where a dump does not say who is in them."""
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
