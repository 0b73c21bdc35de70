"""A smaller plan for a job that has lost hosts, made while it runs."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from orchestrator.cluster.inventory import Host, Inventory
from orchestrator.cluster.profiles import load_profile
from orchestrator.contract.codec import encode
from orchestrator.contract.plan import Plan
from orchestrator.contract.rundir import RunDir
from orchestrator.contract.spec import JobSpec
from orchestrator.errors import PlanError
from orchestrator.load import read_spec
from orchestrator.model_config import hub_cache, read_model_config
from orchestrator.plan.planner import plan
from orchestrator.plan.show.explain import plan_json
from orchestrator.plan.training import trainer_config
from orchestrator.supervise.state import JobPlan


def replan(run_dir: RunDir, former: Plan, hosts: int, environ: Mapping[str, str]) -> JobPlan:
    """A plan like `former` for as many of `hosts` hosts as can be used, in the run directory.

    The global batch stays: each rank accumulates more micro batches. What the spec says of tp, cp
    and pp stays as well; how many ranks share a copy of the model follows from the hosts.

    Raises:
        PlanError: not even `resilience.min_hosts` hosts can do it; says why the largest cannot.
    """
    spec = read_spec(run_dir.spec)
    config = read_model_config(spec.model, hub_cache(environ))
    first: PlanError | None = None
    for count in range(hosts, spec.resilience.min_hosts - 1, -1):
        smaller = _for_hosts(spec, count)
        try:
            found = plan(smaller, _inventory(former, count), config)
        except PlanError as exc:
            first = first or exc
            continue
        number = _next_number(run_dir)
        run_dir.plan(number).write_text(json.dumps(plan_json(found), indent=2))
        training = trainer_config(smaller, found, config, str(run_dir.path))
        run_dir.trainer_config(number).write_text(json.dumps(encode(training), indent=2))
        return JobPlan(plan=found, number=number)
    raise first or PlanError(f"{hosts} hosts are fewer than resilience.min_hosts")


def _for_hosts(spec: JobSpec, count: int) -> JobSpec:
    parallel = replace(spec.parallel, dp_replicate="auto", dp_shard="auto")
    return replace(spec, cluster=replace(spec.cluster, hosts=count), parallel=parallel)


def _inventory(former: Plan, count: int) -> Inventory:
    """As many hosts of the kind that the job was planned for; which ones is decided later."""
    profile = load_profile(former.profile) if former.profile else None
    return Inventory(
        hosts=tuple(
            Host(
                name=f"node-{number}",
                devices=former.ranks_per_host,
                device_bytes=former.memory.device_bytes,
                profile=profile,
            )
            for number in range(count)
        )
    )


def _next_number(run_dir: RunDir) -> int:
    numbers = [int(path.stem.removeprefix("plan-")) for path in _plans(run_dir.path)]
    return max(numbers, default=0) + 1


def _plans(folder: Path) -> list[Path]:
    return [path for path in folder.glob("plan-*.json") if path.stem[5:].isdigit()]
