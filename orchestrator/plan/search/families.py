"""Groups the meshes that a plan does not show, with the reason for each group."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from orchestrator.contract.mesh import AXES, Mesh
from orchestrator.contract.plan import Memory, Rejected
from orchestrator.plan.figures import show_bytes

Bar = tuple[str, str]
"""The axis of a rule, and the limit that meshes break."""
MANY = 4
"""Up to this many degrees of an axis are listed one by one."""


def rejected_families(
    barred: Mapping[Bar, Sequence[Mesh]],
    too_large: Mapping[Mesh, Memory],
    limit: int,
    others: int,
    objective: str,
) -> tuple[Rejected, ...]:
    """Counts every mesh that is not shown once. Plans may use `limit` bytes of a device. `others`
    fit but rank below those shown."""
    return (
        *(_of_rule(*bar, found) for bar, found in barred.items()),
        *_of_memory(too_large, limit),
        *_of_rank(others, objective),
    )


def _of_rule(axis: str, limit: str, found: Sequence[Mesh]) -> Rejected:
    if axis in AXES:
        degrees = {getattr(mesh, axis) for mesh in found}
    else:
        degrees = {mesh.data_parallel for mesh in found}
    return Rejected(family=f"{axis}={_shown(degrees)}", constraint=limit, count=len(found))


def _of_memory(too_large: Mapping[Mesh, Memory], limit: int) -> Iterator[Rejected]:
    groups: dict[str, list[Mesh]] = defaultdict(list)
    for mesh, memory in too_large.items():
        groups[max(memory.items, key=lambda item: memory.items[item])].append(mesh)
    for item, found in groups.items():
        least = min((too_large[mesh] for mesh in found), key=lambda memory: memory.peak_bytes)
        yield Rejected(
            family=_axes(found),
            constraint=f"need {show_bytes(least.peak_bytes)} or more of"
            f" {_room(limit, least.device_bytes or 0)}, most for {item}",
            count=len(found),
        )


def _room(limit: int, device: int) -> str:
    margin = "" if limit == device else f" ({show_bytes(device)} less the margin)"
    return f"{show_bytes(limit)}{margin}"


def _of_rank(others: int, objective: str) -> Iterator[Rejected]:
    if others:
        worse = "need more memory" if objective == "memory" else "take longer"
        constraint = f"fit, but {worse} than the plans above of their kind, or than all of them"
        yield Rejected(family="all other meshes", constraint=constraint, count=others)


def _axes(found: Sequence[Mesh]) -> str:
    """The degrees of a group, for the axes that it uses."""
    degrees = {axis: {getattr(mesh, axis) for mesh in found} for axis in ("pp", "cp", "tp")}
    shown = [f"{axis}={_shown(some)}" for axis, some in degrees.items() if some != {1}]
    shards = {mesh.dp_shard for mesh in found}
    return ", ".join([*shown, f"dp_shard={_shown(shards)}"])


def _shown(degrees: Collection[int]) -> str:
    some = sorted(degrees)
    if len(some) > MANY:
        return f"{some[0]}…{some[-1]}"
    return "|".join(map(str, some))
