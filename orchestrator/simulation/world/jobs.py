"""The simulated job, planned by the real planner."""

from functools import lru_cache

from msgspec.structs import replace

from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.messages.events import JobSubmitted
from orchestrator.contract.plan import Plan
from orchestrator.contract.spec.data_spec import DataSpec
from orchestrator.contract.spec.job_spec import ClusterSpec, JobSpec
from orchestrator.contract.spec.model_presets import PRESETS
from orchestrator.contract.spec.model_spec import ModelSpec
from orchestrator.contract.spec.train_spec import TrainSpec
from orchestrator.inventory.hosts import Host, Inventory
from orchestrator.inventory.profiles import load_profile
from orchestrator.plan.planner import plan
from orchestrator.simulation.scenario import Scenario

PRESET = "llama-tiny"
PROFILE = "h100-sxm-80gb"
BATCH = 12
"""Sequences in a batch. Some numbers of hosts do not divide it, so their plans are refused."""


@lru_cache(maxsize=256)
def plan_for(hosts: int, each: int, device_bytes: int | None = None) -> Plan:
    """A plan without the parts that only people read. Raises PlanError.

    `device_bytes`: memory of a device, if it is less than the profile's.
    """
    spec = JobSpec(
        name="simulated",
        model=ModelSpec(preset=PRESET),
        data=DataSpec(files="corpus.txt", sequence_length=256),
        train=TrainSpec(steps=1, global_batch_size=BATCH),
        cluster=ClusterSpec(hosts=hosts, gpus_per_host=each),
    )
    found = plan(spec, _inventory(hosts, each, device_bytes), PRESETS[PRESET])
    return replace(found, alternatives=(), rejected=(), notes=(), memory_along_pp=())


def _inventory(hosts: int, each: int, device_bytes: int | None) -> Inventory:
    profile = load_profile(PROFILE)
    return Inventory(
        hosts=tuple(
            Host(
                name=f"node-{number}",
                devices=each,
                device_bytes=device_bytes or profile.memory_bytes,
                profile=profile,
            )
            for number in range(hosts)
        )
    )


def submission_event(
    scenario: Scenario, hosts: tuple[str, ...], at: float, launch: int = 1
) -> JobSubmitted:
    """`hosts`: the available hosts, if no scheduler chooses."""
    wanted = scenario.hosts + scenario.spares
    return JobSubmitted(
        at=at,
        backend=_backend(scenario),
        steps=scenario.steps,
        plan=plan_for(scenario.hosts, scenario.ranks_per_host),
        plan_number=1,
        launch=LaunchPlan(
            job="simulated",
            run_dir="/runs/simulated",
            launch=launch,
            hosts=hosts[:wanted],
            devices_per_host=scenario.ranks_per_host,
            agent_timeout=scenario.agent_timeout,
        ),
        max_restarts=scenario.max_restarts,
        hang_timeout=scenario.hang_timeout,
        init_timeout=scenario.init_timeout,
        stop_grace=scenario.stop_grace,
        resume=launch > 1,
        shrink=scenario.shrink,
        min_hosts=scenario.min_hosts,
        preflight=scenario.preflight,
        policy=scenario.policy,
        failure_classes=scenario.classes,
        on_oom=scenario.on_oom,
        on_nan=scenario.on_nan,
        replace_stragglers=scenario.replace_stragglers,
        replace_warned=scenario.replace_warned,
        in_memory=scenario.remembers,
        copies=scenario.copies if scenario.remembers and scenario.hosts > 1 else 0,
    )


def _backend(scenario: Scenario) -> str:
    if scenario.successor_s is not None:
        return "kubernetes"
    return "slurm" if scenario.scheduled else "local"
