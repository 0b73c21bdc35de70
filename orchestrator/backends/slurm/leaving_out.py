"""Which hosts Slurm is asked to leave out of the next run, so that there can be one. Pure.

A job that excludes more nodes than its partition can spare is `BadConstraints`, and stays so when
the nodes are mended: Slurm does not look at it again. A node that Slurm itself keeps away from
jobs need not be excluded; the job then waits until it is back, or any other of those.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.cluster.slurm.hostlist import expand
from orchestrator.cluster.slurm.nodes import Node
from orchestrator.cluster.slurm.standing import standing_of
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.slurm import SlurmSpec


@dataclass(frozen=True, slots=True)
class LeftOut:
    names: tuple[str, ...]
    dropped: Mapping[str, str]
    """Hosts that Slurm is not asked to leave out, though they were to be -> why."""


def left_out(
    launch: LaunchPlan,
    standing: Collection[str],
    asked: Sequence[str],
    nodes: Sequence[Node],
    partition: str | None,
) -> LeftOut:
    """`standing` are left out already, by the spec or a person or by a run before; `asked` are to
    be as well. `partition`: of the present run."""
    known = {node.name: node for node in nodes}
    dropped = {name: "Slurm knows no such node" for name in asked if name not in known}
    names = {*standing, *asked} & {*known}
    if not _may_run(launch, names, nodes, partition):
        away = _kept_away(launch, {*asked} - {*standing}, known)
        dropped |= {name: f"too few other nodes are left, and it is {away[name]}" for name in away}
        names -= {*away}
    return LeftOut(tuple(sorted(names)), dropped)


def _may_run(
    launch: LaunchPlan, names: Collection[str], nodes: Sequence[Node], partition: str | None
) -> bool:
    spec = launch.slurm or SlurmSpec()
    wanted = spec.partition or partition
    inside = {*wanted.split(",")} if wanted else None
    need = 0 if spec.gpus == "none" else launch.devices_per_host
    fit = [
        node
        for node in nodes
        if (inside is None or inside & {*node.partitions})
        and node.gpus >= need
        and node.name not in names
        and not _is_kept_away(node, spec)
    ]
    return len(fit) >= len(launch.hosts) and not {*expand(spec.nodelist or "")} & {*names}


def _kept_away(
    launch: LaunchPlan, asked: Collection[str], known: Mapping[str, Node]
) -> dict[str, str]:
    """Of the hosts those that Slurm itself gives to nobody."""
    spec = launch.slurm or SlurmSpec()
    there = (known[name] for name in sorted(asked) if name in known)
    return {node.name: node.words for node in there if _is_kept_away(node, spec)}


def _is_kept_away(node: Node, spec: SlurmSpec) -> bool:
    return standing_of(node, reservation=spec.reservation).state == "drained"
