"""What a submission is, and what it hands over to a backend. Nothing is checked or written here."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.app.commands import submitted_from
from orchestrator.app.planning.plans import Planned
from orchestrator.backends.by_name import HERE
from orchestrator.contract.codec import encode
from orchestrator.contract.devices import CPU
from orchestrator.contract.drills import Drill
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.messages.events import JobSubmitted
from orchestrator.contract.plan import Plan
from orchestrator.contract.spec.job_spec import (
    INIT_TIMEOUT_S,
    CommonSpec,
    JobSpec,
    MemoryCheckpointSpec,
    ScriptSpec,
)
from orchestrator.contract.spec.run_spec import Keep, RunSpec
from orchestrator.contract.submission_payload import Handover
from orchestrator.job.state import Run


class Submission(Struct, frozen=True, kw_only=True):
    planned: Planned
    run_root: Path
    drills: tuple[Drill, ...] = ()
    resume: bool = False
    new: bool = False
    own: str | None = None
    """The Slurm job that runs this command and whose nodes the job gets."""
    after: tuple[str, ...] = ()
    """Run directories of jobs that must succeed first."""
    group: str = ""
    """Name of jobs that belong together; empty: that of an earlier run of this job, if any."""
    backend: str = ""
    """Overrides the backend of the spec; empty: the backend of the spec."""

    @property
    def run_dir(self) -> RunDir:
        """The path on this machine."""
        return RunDir((self.run_root / self.planned.spec.name).absolute())

    @property
    def run_dir_of_hosts(self) -> Path:
        """The path on the hosts of the job."""
        cluster = self.planned.spec.cluster
        if cluster.backend == "kubernetes":
            return Path(cluster.kubernetes.run_root) / self.planned.spec.name
        return self.run_dir.path


def launch_of(submission: Submission, number: int, exclude: Sequence[str] = ()) -> LaunchPlan:
    spec = submission.planned.spec
    cluster, count = spec.cluster, len(submission.planned.plan.hosts) + spec.cluster.spare_hosts
    # Placeholder names; a scheduler chooses the hosts later.
    stem = "host" if cluster.backend == "local" else "node"
    return LaunchPlan(
        job=spec.name,
        run_dir=str(submission.run_dir_of_hosts),
        launch=number,
        hosts=tuple(f"{stem}-{i}" for i in range(count)),
        devices_per_host=cluster.gpus_per_host,
        agent_timeout=spec.resilience.agent_timeout,
        slurm=cluster.slurm if cluster.backend == "slurm" else None,
        kubernetes=cluster.kubernetes if cluster.backend == "kubernetes" else None,
        exclude=tuple(exclude),
        capture=spec.captured if isinstance(spec, ScriptSpec) else "",
        after=submission.after,
    )


def handover_of(submission: Submission, job: JobSubmitted) -> Handover:
    from orchestrator.load import dump_spec
    from orchestrator.plan.show.explain import plan_json
    from orchestrator.plan.training import trainer_config

    planned, out = submission.planned, str(submission.run_dir_of_hosts)
    spec, submitted = planned.spec, None
    if spec.cluster.backend != "kubernetes":  # pods do not see the folders of this machine
        spec = replace(spec, run_root=str(submission.run_root.absolute()))
        submitted = (
            None
            if planned.written is None
            else submitted_from(planned.written, here=submission.backend == HERE)
        )
    trainer: Mapping[str, Any] = {}
    if isinstance(planned.spec, JobSpec):
        config = trainer_config(planned.spec, planned.plan, planned.model_config, out)
        trainer = encode(config)
    return Handover(
        job=job,
        spec=dump_spec(spec),
        plan=plan_json(planned.plan),
        trainer=trainer,
        new=submission.new,
        submitted=submitted,
    )


def submitted_event(
    submission: Submission, past: Run, at: float, exclude: Sequence[str] = ()
) -> JobSubmitted:
    spec = submission.planned.spec
    resilience = spec.resilience
    memory = _memory_of(spec, submission.planned.plan)
    number = past.job.launch.launch + 1 if past.job else 1
    plans = max(past.current.number + 1, number) if past.job else number
    return JobSubmitted(
        at=at,
        backend=submission.backend or spec.cluster.backend,
        steps=steps_of(spec),
        plan=submission.planned.plan,
        plan_number=plans,
        launch=launch_of(submission, number, exclude),
        max_restarts=resilience.max_restarts,
        max_allocations=resilience.max_allocations,
        replace_stragglers=resilience.replace_stragglers,
        replace_warned=resilience.replace_warned,
        hang_timeout=None if resilience.hang_timeout == "auto" else resilience.hang_timeout,
        checkpoint_timeout=None
        if resilience.checkpoint_timeout == "auto"
        else resilience.checkpoint_timeout,
        init_timeout=INIT_TIMEOUT_S
        if resilience.init_timeout == "auto"
        else resilience.init_timeout,
        stop_grace=resilience.stop_grace,
        drills=submission.drills,
        resume=past.job is not None,
        shrink=resilience.shrink,
        min_hosts=resilience.min_hosts,
        preflight=_preflight(spec),
        group=submission.group or (past.job.group if past.job else ""),
        policy=resilience.policy,
        failure_classes=resilience.failure_classes,
        on_oom=resilience.on_oom,
        on_nan=resilience.on_nan,
        keep_attempts=resilience.keep_attempts,
        run=run_of(spec),
        keep=_keep(spec),
        notify=spec.notify,
        web=resilience.web,
        keep_ranks=isinstance(spec, JobSpec) and resilience.keep_ranks,
        in_memory=memory is not None,
        copies=0 if memory is None else memory.on_hosts(spec.cluster.hosts).copies,
        copy_bytes_per_s=None
        if memory is None or memory.copy_mib_per_s is None
        else memory.copy_mib_per_s << 20,
    )


def _memory_of(spec: CommonSpec, plan: Plan) -> MemoryCheckpointSpec | None:
    """None: no checkpoints in the memory of the hosts."""
    memory = spec.checkpoint.memory
    # A program of the user decides itself, and without a profile the ranks do.
    if isinstance(spec, JobSpec) and plan.profile is not None:
        memory = memory.on_devices(cpu=plan.profile == CPU)
    return None if memory.every == "off" else memory


def _keep(spec: CommonSpec) -> Keep | None:
    if isinstance(spec, JobSpec):
        return None
    given = spec.checkpoint
    return Keep(keep=given.keep, keep_every=given.keep_every, verify=given.verify)


def _preflight(spec: CommonSpec) -> bool:
    wanted = spec.resilience.preflight
    return spec.cluster.backend != "local" if wanted == "auto" else wanted


def steps_of(spec: CommonSpec) -> int:
    """0: unknown."""
    return spec.train.steps if isinstance(spec, JobSpec) else 0


def run_of(spec: CommonSpec) -> RunSpec | None:
    return spec.run if isinstance(spec, ScriptSpec) else None
