"""Plans for fewer hosts or less memory, made while a job runs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from orchestrator.contract.codec import encode
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.plan import Plan
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.errors import PlanError
from orchestrator.inventory.hosts import Host, Inventory
from orchestrator.inventory.profiles import load_profile
from orchestrator.job.plans import JobPlan, Refit, Shortage
from orchestrator.journal.current_launch import current_spec
from orchestrator.load import of_the_trainer, read_spec
from orchestrator.model_config import hub_cache, read_model_config
from orchestrator.plan.cost.groups import BLOCK
from orchestrator.plan.memory_savings import memory_savings
from orchestrator.plan.planner import plan
from orchestrator.plan.search.edits import apply, show_edits
from orchestrator.plan.show.explain import plan_json
from orchestrator.plan.training import trainer_config


def replan(
    run_dir: RunDir,
    former: Plan,
    hosts: Sequence[str],
    switches: Mapping[str, tuple[str, ...]],
    environ: Mapping[str, str],
) -> JobPlan:
    """Write a plan like `former` for as many of `hosts` as possible to the run directory.

    The global batch size stays: each rank accumulates more micro batches. tp, cp and pp of the
    spec stay. The data-parallel degrees follow from the number of hosts.

    Args:
        switches: switches above each host of the job, also of lost hosts, which may return.

    Raises:
        PlanError: no plan for `resilience.min_hosts` hosts or more; has the reason for the largest.
    """
    spec = of_the_trainer(read_spec(current_spec(run_dir)), "a new plan")
    config = read_model_config(spec.model, hub_cache(environ))
    first: PlanError | None = None
    inventory = _inventory(former, hosts, switches, former.needs.device_bytes)
    for count in range(len(hosts), spec.resilience.min_hosts - 1, -1):
        smaller = _for_hosts(spec, count)
        try:
            found = replace(plan(smaller, inventory, config), switches=switches)
        except PlanError as exc:
            first = first or exc
            continue
        return _written(run_dir, smaller, found, config)
    raise first or PlanError(f"{len(hosts)} hosts are fewer than resilience.min_hosts")


def refit(
    run_dir: RunDir,
    former: Plan,
    hosts: Sequence[str],
    switches: Mapping[str, tuple[str, ...]],
    short: Shortage,
    environ: Mapping[str, str],
) -> Refit:
    """Find the cheapest changes with which `former` fits into the device memory.

    If `short.adopt`, write the plan of the first change that gives the same training on the same
    number of hosts to the run directory.

    Raises:
        PlanError: there is no plan for a reason other than memory.
    """
    spec = of_the_trainer(read_spec(current_spec(run_dir)), "a new plan")
    config = read_model_config(spec.model, hub_cache(environ))
    if len(former.hosts) != spec.cluster.hosts:
        spec = _for_hosts(spec, len(former.hosts))
    inventory = _inventory(former, hosts, switches, short.device_bytes)
    ways = memory_savings(spec, inventory, config, former)
    told, typed = tuple(map(str, ways)), tuple(show_edits(way.edits) for way in ways)
    first = next((way for way in ways if way.plan is not None), None)
    if first is None or first.plan is None:
        why = "no plan with the same training needs less memory"
        return Refit(found=None, why=why, ways=told, edits=typed)
    if not short.adopt:
        return Refit(found=None, why="resilience.on_oom is stop", ways=told, edits=typed)
    changed, found = apply(spec, first.edits), replace(first.plan, switches=switches)
    adopted = _written(run_dir, changed, found, config)
    return Refit(found=adopted, why=str(first), ways=told, edits=typed)


def _written(run_dir: RunDir, spec: JobSpec, found: Plan, config: Mapping[str, Any]) -> JobPlan:
    number = _next_number(run_dir)
    run_dir.plan(number).write_text(json.dumps(plan_json(found), indent=2))
    training = trainer_config(spec, found, config, str(run_dir.path))
    run_dir.trainer_config(number).write_text(json.dumps(encode(training), indent=2))
    return JobPlan(plan=found, number=number)


def _for_hosts(spec: JobSpec, count: int) -> JobSpec:
    parallel = replace(spec.parallel, dp_replicate="auto", dp_shard="auto")
    return replace(spec, cluster=replace(spec.cluster, hosts=count), parallel=parallel)


def _inventory(
    former: Plan,
    hosts: Sequence[str],
    switches: Mapping[str, tuple[str, ...]],
    device_bytes: int | None,
) -> Inventory:
    """The given hosts, with the hardware that the job was planned for."""
    profile = load_profile(former.profile) if former.profile else None
    in_blocks = former.placement is not None and BLOCK in former.placement.levels
    depth = max((len(path) for path in switches.values()), default=0) if in_blocks else 0
    paths = {host: switches.get(host, ()) for host in hosts}
    blocks = {host: path[-1] for host, path in paths.items() if path and len(path) == depth}
    return Inventory(
        hosts=tuple(
            Host(
                name=host,
                devices=former.ranks_per_host,
                device_bytes=device_bytes,
                profile=profile,
                switches=path[:-1] if host in blocks else path,
                nvlink_block=blocks.get(host),
            )
            for host, path in paths.items()
        )
    )


def _next_number(run_dir: RunDir) -> int:
    numbers = [int(path.stem.removeprefix("plan-")) for path in _plans(run_dir.path)]
    return max(numbers, default=0) + 1


def _plans(folder: Path) -> list[Path]:
    return [path for path in folder.glob("plan-*.json") if path.stem[5:].isdigit()]
