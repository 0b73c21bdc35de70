"""Choose the hosts that the next run of a Slurm job excludes, so that it can still run. Pure.

A job that excludes too many nodes gets the reason `BadConstraints`, and Slurm never tries it again,
even after the nodes are repaired. So a node is not excluded if too few others are left and Slurm
itself gives it to no job: then the job waits until a node is back. A node that was lost and is up
again is not excluded either if the job needs it.
"""

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from orchestrator.backends.slurm.node_fit import is_away, most_in_one_partition
from orchestrator.contract.launch import LaunchPlan
from orchestrator.inventory.slurm.hostlist import expand
from orchestrator.inventory.slurm.nodes import Node


class LeftOut(Struct, frozen=True):
    names: tuple[str, ...]
    dropped: Mapping[str, str]
    """Hosts that are not excluded although it was requested -> reason."""


def left_out(
    launch: LaunchPlan,
    standing: Collection[str],
    asked: Sequence[str],
    nodes: Sequence[Node],
    partition: str | None,
    unusable: Collection[str] = (),
) -> LeftOut:
    """Args:
    standing: hosts excluded already, by the spec, a person or an earlier run.
    asked: hosts to exclude as well.
    partition: partition of the current run.
    unusable: hosts that the next leader would not use because of strikes or a rule. They stay
        excluded, because with one of them the job would be requeued immediately.
    """
    spec = launch.slurm_spec
    known = {node.name: node for node in nodes}
    dropped = {name: "Slurm has no such node" for name in asked if name not in known}
    names = {*standing, *asked} & {*known}
    present = [node for node in nodes if not is_away(node, spec)]
    if not _may_run(launch, names, present, partition):
        away = _kept_away(launch, {*asked} - {*standing}, known)
        dropped |= {name: f"too few other nodes are left, and it is {away[name]}" for name in away}
        names -= {*away}
    for name in sorted(({*asked} & names) - {*standing, *unusable}):
        if not _may_run(launch, names, nodes, partition):
            names.remove(name)
            dropped[name] = f"the job needs it, and it is {known[name].words} again"
    return LeftOut(tuple(sorted(names)), dropped)


def _may_run(
    launch: LaunchPlan, names: Collection[str], nodes: Sequence[Node], partition: str | None
) -> bool:
    """Whether one partition has enough `nodes` without the excluded ones. Slurm takes all nodes of
    a job from one partition."""
    spec = launch.slurm_spec
    if {*expand(spec.nodelist or "")} & {*names}:
        return False
    others = (node for node in nodes if node.name not in names)
    asked = spec.partitions or ((partition,) if partition else ())
    return most_in_one_partition(launch, asked, others) >= len(launch.hosts)


def _kept_away(
    launch: LaunchPlan, asked: Collection[str], known: Mapping[str, Node]
) -> dict[str, str]:
    """The hosts that Slurm itself gives to no job."""
    spec = launch.slurm_spec
    there = (known[name] for name in sorted(asked) if name in known)
    return {node.name: node.words for node in there if is_away(node, spec)}
