"""What stands in the way of a launch, all at once, before it is queued. Pure but for two paths."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.cluster.slurm.hostlist import expand
from orchestrator.cluster.slurm.nodes import Node
from orchestrator.cluster.slurm.partitions import Partition, seconds, time_words
from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.slurm import SlurmSpec
from orchestrator.supervise.leaving import ASK_S, STOP_SLACK_S, room_s

AT = "cluster.slurm"


def problems(
    launch: LaunchPlan,
    python: str,
    partitions: Sequence[Partition],
    nodes: Sequence[Node],
) -> list[Problem]:
    spec = launch.slurm or SlurmSpec()
    found = [*_paths(launch, spec, python)]
    names = spec.partition.split(",") if spec.partition else []
    known = {one.name: one for one in partitions}
    asked = [known[name] for name in names if name in known]
    if not names:
        asked = [one for one in partitions if one.default]
    found += _partitions(names, known, asked)
    if asked and not found:
        found += _limits(launch, spec, asked)
        found += _nodes(launch, spec, {one.name for one in asked}, nodes)
    return found


def cut_short(launch: LaunchPlan, stop_grace: float) -> str:
    """In words, where ranks do not have the time that they are promised for a checkpoint."""
    notice_s = (launch.slurm or SlurmSpec()).notice_s
    room, least = room_s(notice_s), stop_grace + STOP_SLACK_S + ASK_S
    if room >= stop_grace:
        return ""
    return (
        f"{AT}.notice_s is {notice_s:g}: at a time limit ranks have {room:.0f} s for a checkpoint,"
        f" not the {stop_grace:g} s of resilience.stop_grace; set notice_s to {least:.0f} or more"
    )


def _paths(launch: LaunchPlan, spec: SlurmSpec, python: str) -> Iterator[Problem]:
    run_dir = Path(launch.run_dir)
    if not run_dir.is_absolute() or "%" in launch.run_dir or "\n" in launch.run_dir:
        yield Problem(
            path="run_root",
            value=launch.run_dir,
            limit="absolute and without %, which Slurm replaces",
            fix="give --run-root another directory",
        )
    there = next(one for one in (run_dir, *run_dir.parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield Problem(
            path="run_root",
            value=str(there),
            limit="a directory that you may write to, on a file system that every node sees",
            fix="give --run-root another directory",
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
            limit=f"such that {run_dir} is the same inside and outside",
            fix=f"add {run_dir.parent}:{run_dir.parent}",
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
                limit=f"one of {', '.join(sorted(known))}",
                fix="name a partition that `sinfo -as` shows",
            )
    if not names and not asked:
        yield Problem(
            path=f"{AT}.partition",
            limit=f"one of {', '.join(sorted(known))}: the cluster has no default",
            fix="name a partition that `sinfo -as` shows",
        )
    if asked and len(asked) == len(names or asked) and all(one.state != "UP" for one in asked):
        yield Problem(
            path=f"{AT}.partition",
            value=asked[0].name,
            limit=f"up, but it is {asked[0].state}",
            fix="take another partition, or ask the administrators",
        )


def _limits(launch: LaunchPlan, spec: SlurmSpec, asked: Sequence[Partition]) -> Iterator[Problem]:
    wanted = seconds(str(spec.time)) if spec.time else None
    most = [one.max_time_s for one in asked]
    limit = max((one for one in most if one is not None), default=None)
    if wanted is not None and limit is not None and None not in most and wanted > limit:
        yield Problem(
            path=f"{AT}.time",
            value=spec.time,
            limit=f"at most the partition's {time_words(limit)}",
            fix=f"set it to {time_words(limit)}; the job goes on in further allocations by itself",
        )
    sizes = [one.max_nodes for one in asked if one.max_nodes is not None]
    if len(sizes) == len(asked) and len(launch.hosts) > max(sizes):
        yield Problem(
            path="cluster.hosts",
            value=len(launch.hosts),
            limit=f"with spare_hosts at most the partition's {max(sizes)} nodes a job",
            fix="ask for fewer hosts or spares, or take another partition",
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
    need = 0 if spec.gpus == "none" else launch.devices_per_host
    fit = [node for node in there if node.gpus >= need]
    where = f"partition {', '.join(sorted(partitions))}"
    if there and not fit:
        yield Problem(
            path="cluster.gpus_per_host",
            value=need,
            limit=f"at most {max(node.gpus for node in there)}, what a node of {where} has",
            fix="ask for fewer, or set cluster.slurm.gpus to none where ranks run on CPUs",
        )
    elif len(fit) < len(launch.hosts):
        yield Problem(
            path="cluster.hosts",
            value=len(launch.hosts),
            limit=f"with spare_hosts at most {len(fit)}, the nodes of {where} that have {need} GPUs"
            " and are not excluded",
            fix="ask for fewer hosts or spares, or take another partition",
        )
