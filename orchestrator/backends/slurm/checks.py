"""Check a launch before it is queued, and report all problems at once.

Pure, except that the run root and the interpreter are looked up on this machine.
"""

import grp
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from orchestrator.backends.slurm.node_fit import fits, is_away, mib, most_in_one_partition
from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.slurm_spec import SlurmSpec, notice_too_long, seconds
from orchestrator.inventory.slurm.hostlist import expand, fold
from orchestrator.inventory.slurm.nodes import IN_RESERVATION, Node
from orchestrator.inventory.slurm.partitions import (
    Partition,
    not_up_fix,
    partition_fix,
    time_words,
)
from orchestrator.job.hosts.preemption import ASK_S, STOP_SLACK_S, room_s
from orchestrator.posix.denied import owner_of

AT = "cluster.slurm"


def problems(
    launch: LaunchPlan, python: str, partitions: Sequence[Partition], nodes: Sequence[Node]
) -> list[Problem]:
    spec = launch.slurm_spec
    found = [*_paths(launch, spec, python), *_group(spec)]
    names = spec.partitions
    known = {one.name: one for one in partitions}
    asked = asked_partitions(spec, partitions)
    found += _partitions(names, known, asked)
    if asked and not found:
        found += _limits(launch, spec, asked)
        found += _nodes(launch, spec, {one.name for one in asked}, nodes)
    return found


def asked_partitions(spec: SlurmSpec, partitions: Sequence[Partition]) -> list[Partition]:
    """The existing partitions among those that the spec names, or the default partition."""
    if not spec.partitions:
        return [one for one in partitions if one.default]
    known = {one.name: one for one in partitions}
    return [known[name] for name in spec.partitions if name in known]


def cut_short(launch: LaunchPlan, stop_grace: float) -> str:
    """A warning if ranks get less time for a checkpoint than stop_grace; else empty."""
    notice_s = launch.slurm_spec.notice_s
    room, least = room_s(notice_s), stop_grace + STOP_SLACK_S + ASK_S
    if room >= stop_grace:
        return ""
    return (
        f"{AT}.notice_s is {notice_s:g}: at a time limit ranks have {room:.0f} s for a checkpoint,"
        f" less than resilience.stop_grace of {stop_grace:g} s; set notice_s to {least:.0f} or more"
    )


def _paths(launch: LaunchPlan, spec: SlurmSpec, python: str) -> Iterator[Problem]:
    run_dir = Path(launch.run_dir)
    if not run_dir.is_absolute() or "%" in launch.run_dir or "\n" in launch.run_dir:
        yield Problem(
            path="run_root",
            value=launch.run_dir,
            limit="an absolute path without %, which Slurm replaces",
            fix="set --run-root to another directory",
        )
    there = next(one for one in (run_dir, *run_dir.parents) if one.exists())
    if there == run_dir and there.is_dir() and not os.access(there, os.W_OK | os.X_OK):
        yield Problem(
            path="name",
            value=run_dir.name,
            limit=f"unused in {run_dir.parent}; {owner_of(there)} uses it",
            fix="choose another name, or set --run-root to another directory",
        )
    elif not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield Problem(
            path="run_root",
            value=str(there),
            limit="a directory that you can write to, on a file system that every node sees",
            fix="set --run-root to another directory",
        )
    if spec.container is None and not os.access(python, os.X_OK):
        yield Problem(
            path="python",
            value=python,
            limit="an interpreter that every node sees",
            fix="install ndctl in a virtual environment on the shared file system",
        )
    if spec.container is not None and not _mounted(run_dir, spec.container.mounts):
        yield Problem(
            path=f"{AT}.container.mounts",
            value=list(spec.container.mounts),
            limit=f"a list that mounts {run_dir} at the same path in the container",
            fix=f"add {run_dir.parent}:{run_dir.parent}",
        )


def _group(spec: SlurmSpec) -> Iterator[Problem]:
    """A user can give files only to a group that the user is in."""
    if spec.group is None:
        return
    own = {*os.getgroups(), os.getegid()}
    try:
        number = grp.getgrnam(spec.group).gr_gid
    except KeyError:
        number = -1
    if number in own or (number >= 0 and os.geteuid() == 0):
        return
    names = sorted(found.gr_name for found in grp.getgrall() if found.gr_gid in own)
    yield Problem(
        path=f"{AT}.group",
        value=spec.group,
        limit=f"a Unix group that you are in, one of {', '.join(names)}",
        fix="use one of these groups, or ask the administrators to add you to the group",
    )


def _mounted(run_dir: Path, mounts: Sequence[str]) -> bool:
    pairs = (mount.split(":") for mount in mounts)
    same = (Path(pair[0]) for pair in pairs if len(pair) == 1 or pair[0] == pair[1])
    return any(run_dir.is_relative_to(path) for path in same)


def _partitions(
    names: Sequence[str], known: dict[str, Partition], asked: Sequence[Partition]
) -> Iterator[Problem]:
    for name in names:
        if name not in known:
            yield Problem(
                path=f"{AT}.partition",
                value=name,
                limit="a partition of this cluster",
                fix=partition_fix(name, known),
            )
    if not names and not asked:
        yield Problem(
            path=f"{AT}.partition",
            limit="given, because the cluster has no default partition",
            fix=partition_fix("", known),
        )
    if asked and len(asked) == len(names or asked) and all(one.state != "UP" for one in asked):
        yield Problem(
            path=f"{AT}.partition",
            value=asked[0].name,
            limit=f"up, but it is {asked[0].state}",
            fix=not_up_fix(asked[0].name),
        )


def _limits(launch: LaunchPlan, spec: SlurmSpec, asked: Sequence[Partition]) -> Iterator[Problem]:
    wanted = seconds(str(spec.time)) if spec.time else None
    most = [one.max_time_s for one in asked]
    limit = max((one for one in most if one is not None), default=None)
    if wanted is not None and limit is not None and None not in most and wanted > limit:
        yield Problem(
            path=f"{AT}.time",
            value=spec.time,
            limit=f"at most {time_words(limit)}, the limit of the partition",
            fix=f"set it to {time_words(limit)}; the job continues in further allocations",
        )
        if problem := notice_too_long(spec.notice_s, limit, "the time limit of the partition"):
            fix = f"set it to {limit / 2:g} or less, or use another partition"
            yield replace(problem, path=f"{AT}.notice_s", fix=fix)
    if wanted is None:
        given = [one.default_time_s or one.max_time_s for one in asked]
        usual = None if None in given else max(one for one in given if one is not None)
        whose = "the default time limit of the partition"
        if problem := notice_too_long(spec.notice_s, usual, whose):
            yield replace(problem, path=f"{AT}.notice_s")
    sizes = [one.max_nodes for one in asked if one.max_nodes is not None]
    if len(sizes) == len(asked) and len(launch.hosts) > max(sizes):
        yield Problem(
            path="cluster.hosts",
            value=len(launch.hosts),
            limit=f"at most {max(sizes)} with spare_hosts, the nodes per job of the partition",
            fix="use fewer hosts or spares, or another partition",
        )


def _nodes(
    launch: LaunchPlan, spec: SlurmSpec, partitions: set[str], nodes: Sequence[Node]
) -> Iterator[Problem]:
    try:
        excluded = {*expand(spec.exclude or ""), *launch.exclude}
    except Invalid as exc:
        yield from (replace(one, path=f"{AT}.exclude") for one in exc.problems)
        return
    there = [n for n in nodes if partitions & set(n.partitions) and n.name not in excluded]
    where = f"partition {', '.join(sorted(partitions))}"
    too_much = list(_too_much(launch, spec, there, where))
    yield from too_much
    # Nodes do not show a reservation that has not started, so the reservation is ignored here.
    anywhere = replace(launch, slurm=replace(spec, reservation=None))
    most = most_in_one_partition(anywhere, partitions, there)
    if too_much or most >= len(launch.hosts):
        return
    need = 0 if spec.gpus == "none" else launch.devices_per_host
    yield Problem(
        path="cluster.hosts",
        value=len(launch.hosts),
        limit=f"at most {most} with spare_hosts, the nodes of {where} with {need} GPUs that are not"
        " excluded",
        fix="use fewer hosts or spares, or another partition"
        + ("; `ndctl hosts` shows the hosts that ndctl excludes" if launch.exclude else ""),
    )


def _too_much(
    launch: LaunchPlan, spec: SlurmSpec, there: Sequence[Node], where: str
) -> Iterator[Problem]:
    """Requests per host that no node can satisfy. Slurm queues such a job for ever, with the same
    message as for a job whose nodes are down for an hour."""
    need = 0 if spec.gpus == "none" else launch.devices_per_host
    gpus = max((node.gpus for node in there), default=0)
    if there and need > gpus:
        yield Problem(
            path="cluster.gpus_per_host",
            value=need,
            limit=f"at most {gpus}, the GPUs of the largest node of {where}",
            fix="use fewer, or set cluster.slurm.gpus to none if ranks run on CPUs",
        )
    cpus = max((node.cpus for node in there), default=0)
    if cpus and (spec.cpus_per_task or 0) > cpus:
        yield Problem(
            path=f"{AT}.cpus_per_task",
            value=spec.cpus_per_task,
            limit=f"at most {cpus}, the CPUs of the largest node of {where}",
            fix=f"set it to {cpus} or less, or remove it to get all CPUs of an exclusive node",
        )
    memory = max((node.memory_mib for node in there), default=0)
    if memory and (mib(spec.mem) or 0) > memory:
        yield Problem(
            path=f"{AT}.mem",
            value=spec.mem,
            limit=f"at most {memory}M, the memory of the largest node of {where}",
            fix=f'set it to {memory}M or less, or to "0" for all memory of a node',
        )


def is_never_available(
    launch: LaunchPlan, partitions: Sequence[Partition], nodes: Sequence[Node]
) -> bool:
    """Whether Slurm reports the nodes as not available because no node can ever run the job.

    Slurm prints the same message for a job that no node can run, and for one whose nodes are down,
    drained or reserved now. Here the states of the nodes decide which it is.
    """
    spec = launch.slurm_spec
    if _names_nodes(spec):
        return (
            False  # 22.05 prints the message for a nodelist shorter than --nodes, but runs the job
        )
    there = _nodes_asked(launch, partitions, nodes)
    open_now = [node for node in there if not _is_closed(node, spec)]
    if len(open_now) == len(there):
        return True
    if _asks_more(spec):
        return False  # a node that is down may be the only one with features not checked here
    asked = [one.name for one in asked_partitions(spec, partitions)]
    return most_in_one_partition(launch, asked, open_now) >= len(launch.hosts)


def closed(launch: LaunchPlan, partitions: Sequence[Partition], nodes: Sequence[Node]) -> str:
    """Nodes that match the request and that Slurm gives to no job at present, with the reason of
    the administrator: `node[1-3] (power), node7`. Empty if there are none."""
    by_reason: dict[str, list[str]] = {}
    for node in _nodes_asked(launch, partitions, nodes):
        if _is_closed(node, launch.slurm_spec) and fits(launch, node):
            by_reason.setdefault(node.reason, []).append(node.name)
    named = (fold(names) + (f" ({why})" if why else "") for why, names in by_reason.items())
    return ", ".join(named)


def _nodes_asked(
    launch: LaunchPlan, partitions: Sequence[Partition], nodes: Sequence[Node]
) -> list[Node]:
    asked = {one.name for one in asked_partitions(launch.slurm_spec, partitions)}
    return [n for n in nodes if asked & set(n.partitions) and n.name not in launch.exclude]


def _is_closed(node: Node, spec: SlurmSpec) -> bool:
    return is_away(node, spec) or (bool(node.flags & IN_RESERVATION) and spec.reservation is None)


def _asks_more(spec: SlurmSpec) -> bool:
    """Whether the request has conditions on nodes that `node_fit` does not check."""
    rich = bool(set(spec.constraint or "") & set("[]()*"))
    return rich or bool(spec.gres or spec.licenses or spec.sbatch_args)


def _names_nodes(spec: SlurmSpec) -> bool:
    options = ("-w", "--nodelist", "-F", "--nodefile")
    return bool(spec.nodelist) or any(one.startswith(options) for one in spec.sbatch_args)
