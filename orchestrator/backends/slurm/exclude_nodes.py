"""Which hosts Slurm is asked to leave out of the next run, so that there can be one. Pure.

A job that excludes more nodes than its partition can spare is `BadConstraints`, and stays so when
the nodes are repaired: Slurm does not look at it again. A node that Slurm itself keeps away from
jobs need not be excluded; the job then waits until it is back, or any other of those. Nor is a
node that was only lost, and is up by now, where no other one would do.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.backends.slurm.node_fit import is_away, most_in_one_partition
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.slurm_spec import SlurmSpec
from orchestrator.inventory.slurm.hostlist import expand
from orchestrator.inventory.slurm.nodes import Node


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
    unusable: Collection[str] = (),
) -> LeftOut:
    """`standing` are left out already, by the spec or a person or by a run before; `asked` are to
    be as well. `partition`: of the present run. `unusable`: hosts that the next leader would not
    use either, by strikes or a rule: to be given one would only have the job queued again."""
    spec = launch.slurm or SlurmSpec()
    known = {node.name: node for node in nodes}
    dropped = {name: "Slurm knows no such node" for name in asked if name not in known}
    names = {*standing, *asked} & {*known}
    present = [node for node in nodes if not is_away(node, spec)]
    if not _may_run(launch, names, present, partition):
        away = _kept_away(launch, {*asked} - {*standing}, known)
        dropped |= {name: f"too few other nodes are left, and it is {away[name]}" for name in away}
        names -= {*away}
    for name in sorted(({*asked} & names) - {*standing, *unusable}):
        if not _may_run(launch, names, nodes, partition):
            names.remove(name)
            dropped[name] = f"no other node would do, and it is {known[name].words} again"
    return LeftOut(tuple(sorted(names)), dropped)


def _may_run(
    launch: LaunchPlan, names: Collection[str], nodes: Sequence[Node], partition: str | None
) -> bool:
    """Whether one of the job's partitions, for it gets its nodes of one, has enough of `nodes`
    beside those that are left out."""
    spec = launch.slurm or SlurmSpec()
    if {*expand(spec.nodelist or "")} & {*names}:
        return False
    others = (node for node in nodes if node.name not in names)
    asked = spec.partitions or ((partition,) if partition else ())
    return most_in_one_partition(launch, asked, others) >= len(launch.hosts)


def _kept_away(
    launch: LaunchPlan, asked: Collection[str], known: Mapping[str, Node]
) -> dict[str, str]:
    """Of the hosts those that Slurm itself gives to nobody."""
    spec = launch.slurm or SlurmSpec()
    there = (known[name] for name in sorted(asked) if name in known)
    return {node.name: node.words for node in there if is_away(node, spec)}
