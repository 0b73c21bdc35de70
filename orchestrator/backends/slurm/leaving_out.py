"""Which hosts Slurm is asked to leave out of the next run, so that there can be one. Pure.

A job that excludes more nodes than its partition can spare is `BadConstraints`, and stays so when
the nodes are mended: Slurm does not look at it again. A node that Slurm itself keeps away from
jobs need not be excluded; the job then waits until it is back, or any other of those.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.cluster.slurm.hostlist import expand
from orchestrator.cluster.slurm.inventory import Use, unfit
from orchestrator.cluster.slurm.nodes import IN_RESERVATION, Node
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
    """Whether one of the job's partitions, for it gets its nodes of one, has enough others."""
    spec = launch.slurm or SlurmSpec()
    if {*expand(spec.nodelist or "")} & {*names}:
        return False
    others = (node for node in nodes if node.name not in names)
    fit = [node for node in others if _could_have(launch, spec, node)]
    wanted = spec.partition or partition
    if not wanted:
        return len(fit) >= len(launch.hosts)
    room = Counter(name for node in fit for name in node.partitions)
    return any(room[name] >= len(launch.hosts) for name in wanted.split(","))


def _could_have(launch: LaunchPlan, spec: SlurmSpec, node: Node) -> bool:
    """Whether the job's request fits the node, and Slurm gives it to anybody."""
    on_cpus = spec.gpus == "none"
    use = Use(constraint=spec.constraint, gpu_type=None if on_cpus else spec.gpu_type)
    need = 0 if on_cpus else launch.devices_per_host
    reserved = spec.reservation is None or (
        node.flags & IN_RESERVATION and node.reservation in (spec.reservation, None)
    )
    fits = bool(reserved) and node.gpus >= need and not unfit(node, use)
    return fits and not _is_kept_away(node, spec)


def _kept_away(
    launch: LaunchPlan, asked: Collection[str], known: Mapping[str, Node]
) -> dict[str, str]:
    """Of the hosts those that Slurm itself gives to nobody."""
    spec = launch.slurm or SlurmSpec()
    there = (known[name] for name in sorted(asked) if name in known)
    return {node.name: node.words for node in there if _is_kept_away(node, spec)}


def _is_kept_away(node: Node, spec: SlurmSpec) -> bool:
    return standing_of(node, reservation=spec.reservation).state == "drained"
