"""Use cases: what the command line's verbs do. The only place that picks a backend and a clock."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.contract.codec import encode
from orchestrator.contract.drills import Drill
from orchestrator.contract.events import JobSubmitted
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.plan import Plan
from orchestrator.contract.protocol import CANCEL_PATH
from orchestrator.contract.rundir import RunDir
from orchestrator.contract.spec import JobSpec
from orchestrator.contract.training import TrainingConfig
from orchestrator.errors import BackendError, JobError, PlanError
from orchestrator.seams import Backend, Clock
from orchestrator.supervise.log import Journal, has_writer, read
from orchestrator.supervise.state import Run
from orchestrator.supervise.step import fold

if TYPE_CHECKING:
    from orchestrator.backends.slurm.inventory import HostsFor
    from orchestrator.cluster.inventory import Inventory
    from orchestrator.plan.show.compare import Compared
    from orchestrator.plan.show.zero import ZeroTable

INIT_TIMEOUT_S = 600.0
"""`init_timeout: auto`: imports on a cold file system, rendezvous, loading a checkpoint."""
ARCHIVE = ".archive"
"""Where `--new` puts the run of the same name that ended before."""
CANCEL_TIMEOUT_S = 10.0
ENDING_POLL_S = 0.1
LEAVE_S = 15.0
"""For the agents of a job that has ended to leave by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A spec with everything that follows from it."""

    spec: JobSpec
    plan: Plan
    model_config: Mapping[str, Any]


def plan_spec(
    path: Path,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    inventory: Path | None = None,
) -> Planned:
    """Read and plan a spec, for the hosts in the file `inventory`, or else for those of the spec's
    backend: Slurm's, or this machine's.

    Raises SpecError or PlanError with everything that is wrong, BackendError where Slurm does not
    answer.
    """
    from orchestrator.load import read_spec
    from orchestrator.model_config import hub_cache, read_model_config
    from orchestrator.plan.planner import plan

    spec = read_spec(path, overrides)
    config = read_model_config(spec.model, hub_cache(environ))
    if inventory is None and spec.cluster.backend == "slurm":
        return _planned_on_slurm(spec, config, environ)
    found = plan(spec, _inventory(spec, inventory, environ), config)
    return Planned(spec=spec, plan=found, model_config=config)


def _planned_on_slurm(
    spec: JobSpec, config: Mapping[str, Any], environ: Mapping[str, str]
) -> Planned:
    """Planned for the hosts that Slurm has, and with what the plan asks of the topology."""
    from orchestrator.cluster.slurm.request import request_of, requested
    from orchestrator.plan.planner import plan

    hosts = _slurm_hosts(spec, environ)
    found = plan(spec, hosts.inventory, config)
    found = replace(found, notes=(*found.notes, *hosts.notes))
    asks = request_of(found, hosts.inventory, hosts.topology, spec.cluster.spare_hosts)
    cluster = replace(spec.cluster, slurm=requested(spec.cluster.slurm, asks))
    return Planned(spec=replace(spec, cluster=cluster), plan=found, model_config=config)


def _slurm_hosts(spec: JobSpec, environ: Mapping[str, str]) -> "HostsFor":
    from orchestrator.backends.slurm.inventory import hosts_for
    from orchestrator.cluster.slurm.gpus import gpu_table
    from orchestrator.system import run_command

    return hosts_for(run_command, gpu_table(environ), spec.cluster)


def _inventory(spec: JobSpec, file: Path | None, environ: Mapping[str, str]) -> "Inventory":
    if file is not None:
        from orchestrator.cluster.file import read_inventory

        return read_inventory(file)
    if spec.cluster.backend == "slurm":
        return _slurm_hosts(spec, environ).inventory
    from orchestrator.cluster.local import local_inventory

    return local_inventory(spec.cluster)


def inventory_at(
    file: Path | None,
    environ: Mapping[str, str],
    backend: str = "local",
    partition: str | None = None,
) -> "Inventory":
    """The hosts in `file`, or else those of `backend`: Slurm's, or this machine."""
    if file is None and backend == "slurm":
        from orchestrator.backends.slurm.inventory import read_cluster
        from orchestrator.cluster.slurm.gpus import gpu_table
        from orchestrator.cluster.slurm.inventory import Use
        from orchestrator.system import run_command

        table = gpu_table(environ)
        return read_cluster(run_command, partition, whole=True).inventory(table, Use())
    if file is None:
        from orchestrator.cluster.local import this_machine

        return this_machine(environ)
    from orchestrator.cluster.file import read_inventory

    return read_inventory(file)


def compare_plans(
    path: Path,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    inventory: Path | None,
    compare: Sequence[str],
) -> "list[Compared]":
    """A plan for each combination of the values in `compare`, each `KEY=VALUE,VALUE`."""
    from itertools import product

    from orchestrator.plan.show.compare import Compared

    keys = [one.partition("=")[::2] for one in compare]
    found = []
    for values in product(*([f"{key}={value}" for value in some.split(",")] for key, some in keys)):
        said = " ".join(values)
        try:
            planned = plan_spec(path, (*overrides, *values), environ, inventory)
        except PlanError as exc:
            found.append(Compared(values=said, plan=None, refusal=exc.message))
        else:
            found.append(Compared(values=said, plan=planned.plan))
    return found


def zero_of(
    path: Path, overrides: Sequence[str], environ: Mapping[str, str], inventory: Path | None
) -> "ZeroTable":
    """What ZeRO's levels need of the model on as many devices as the job has, fit or not."""
    from orchestrator.load import read_spec
    from orchestrator.model_config import hub_cache, read_model_config
    from orchestrator.plan.model.families import shape_of
    from orchestrator.plan.show.zero import ZeroTable

    spec = read_spec(path, overrides)
    shape = shape_of(read_model_config(spec.model, hub_cache(environ)))
    devices = spec.cluster.hosts * spec.cluster.gpus_per_host
    fabric = _inventory(spec, inventory, environ).fabric(spec.cluster.gpus_per_host)
    real = inventory is not None or spec.cluster.backend != "local"
    limit = fabric.profile.memory_bytes if fabric and real else None
    return ZeroTable.of(shape, devices, spec.train.optimizer.name, limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    planned: Planned
    run_root: Path
    drills: tuple[Drill, ...] = ()
    resume: bool = False
    new: bool = False

    @property
    def run_dir(self) -> RunDir:
        return RunDir((self.run_root / self.planned.spec.name).absolute())


def launch_of(submission: Submission, number: int, exclude: Sequence[str] = ()) -> LaunchPlan:
    spec = submission.planned.spec
    cluster, count = spec.cluster, len(submission.planned.plan.hosts) + spec.cluster.spare_hosts
    on_slurm = cluster.backend == "slurm"
    # Which hosts a scheduler gives is known when it has given them.
    stem = "node" if on_slurm else "host"
    return LaunchPlan(
        job=spec.name,
        run_dir=str(submission.run_dir.path),
        launch=number,
        hosts=tuple(f"{stem}-{i}" for i in range(count)),
        devices_per_host=cluster.gpus_per_host,
        agent_timeout=spec.resilience.agent_timeout,
        slurm=cluster.slurm if on_slurm else None,
        exclude=tuple(exclude),
    )


def _struck(submission: Submission, backend: Backend, clock: Clock) -> tuple[str, ...]:
    """Hosts of the cluster that broke too many jobs to be asked for."""
    from orchestrator import strikes

    if not (submission.run_root / strikes.FOLDER).exists():
        return ()  # without asking the scheduler its name
    path = strikes.path_of(submission.run_root, backend.cluster())
    return tuple(sorted(strikes.excluded(path, clock.now())))


def render(submission: Submission, environ: Mapping[str, str]) -> str:
    """Exactly what `submit` would start, or hand to a scheduler."""
    from orchestrator.system import SystemClock

    clock = SystemClock()
    backend = _backend(submission.planned.spec.cluster.backend, environ, clock)
    return backend.describe(launch_of(submission, 1, _struck(submission, backend, clock)))


def _backend(name: str, environ: Mapping[str, str], clock: Clock) -> Backend:
    from orchestrator.backends import backend_named
    from orchestrator.system import run_command

    return backend_named(name, environ, clock, run_command)


def dry_run(submission: Submission, environ: Mapping[str, str], clock: Clock) -> str:
    """What `submit` would write and start, and what a scheduler that can be asked says to it."""
    backend = _backend(submission.planned.spec.cluster.backend, environ, clock)
    config = json.dumps(encode(_trainer_config(submission)), indent=2)
    launch = launch_of(submission, 1, _struck(submission, backend, clock))
    try:
        said = backend.check(launch)
    except BackendError as exc:
        said = str(exc)
    answer = "".join(f"\n# {line}" for line in said.splitlines())
    return f"# trainer configuration\n{config}\n\n{backend.describe(launch)}{answer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    run_dir: RunDir
    known: int
    """Lines that the journal had before."""


def submit(submission: Submission, environ: Mapping[str, str], clock: Clock) -> Submitted:
    """Write the run directory, start the agents, and return while they work.

    Raises:
        PlanError: the bundled trainer cannot train the model, which can be planned all the same.
        JobError: the job runs already, or ended and neither `resume` nor `new` is said.
        BackendError: the agents could not be started; nothing is left running.
    """
    run_dir = submission.run_dir
    backend = _backend(submission.planned.spec.cluster.backend, environ, clock)
    _check_trainable(submission)
    _check_drills(submission)
    struck = _struck(submission, backend, clock)
    backend.check(launch_of(submission, 1, struck))
    try:
        _admit(submission, environ, clock)
        run_dir.logs.mkdir(parents=True, exist_ok=True)
        with Journal(run_dir.journal, clock) as journal:
            known = len(journal.entries)
            past = fold(entry.event for entry in journal.entries)
            job = submitted_event(submission, past, clock.now(), struck)
            _write_files(submission, job.plan_number)
            journal.append(job)
    except OSError as exc:
        raise BackendError(
            f"the run directory cannot be written: {exc}",
            fix="give --run-root a directory that you may write to; `ndctl doctor` looks at it",
        ) from exc
    backend.submit(job.launch)
    return Submitted(run_dir=run_dir, known=known)


def _check_trainable(submission: Submission) -> None:
    from orchestrator.plan.model.families import shape_of

    shape = shape_of(submission.planned.model_config)
    if shape.untrainable is not None:
        raise PlanError(
            f"the bundled trainer cannot train {shape.model_type}: {shape.untrainable}",
            fix="`ndctl plan` plans it; train it with a trainer of your own",
        )


def _check_drills(submission: Submission) -> None:
    """A drill that can never happen would rehearse nothing."""
    plan, steps = submission.planned.plan, submission.planned.spec.train.steps
    for drill in submission.drills:
        count = plan.world_size if drill.target == "rank" else len(plan.hosts)
        if drill.index >= count or drill.step > steps:
            raise JobError(
                f"drill {drill} would never happen: the job has {count} {drill.target}s,"
                f" counted from 0, and {steps} steps",
                fix=f"for example --drill {drill.fault}:{drill.target}=0@step={min(2, steps)}",
            )


def _admit(submission: Submission, environ: Mapping[str, str], clock: Clock) -> None:
    """Refuse a second start; make room for a new one."""
    run_dir, name = submission.run_dir, submission.planned.spec.name
    if has_writer(run_dir.journal):
        raise JobError(
            f"job {name} is running",
            fix=f"watch it with `ndctl dashboard {name}`, end it with `ndctl cancel {name}`",
        )
    entries = read(run_dir.journal)
    if not entries:
        if submission.resume:
            raise JobError(f"job {name} has no run to resume", fix="submit it without --resume")
        return
    run = fold(entry.event for entry in entries)
    if submission.new:
        _clear(run, environ, clock)
        _archive(submission.run_root, run_dir, clock)
        return
    standing = _standing(run, environ, clock)
    if standing is not None:
        raise JobError(
            f"job {name} is in the scheduler's hands: {standing}",
            fix=f"watch it with `ndctl status {name}`, end it with `ndctl cancel {name}`",
        )
    if not submission.resume:
        state = run.state
        ended = f"ended {state}" if state in ("SUCCEEDED", "FAILED", "CANCELLED") else "was cut off"
        raise JobError(
            f"job {name} exists in {run_dir.path} and {ended}",
            fix="--resume goes on from its newest checkpoint; --new starts over and keeps the old"
            f" run in {ARCHIVE}/",
        )


def _clear(run: Run, environ: Mapping[str, str], clock: Clock) -> None:
    """End what a launch left running."""
    if run.job is not None:
        _backend(run.job.backend, environ, clock).clear(run.job.launch)


def _standing(run: Run, environ: Mapping[str, str], clock: Clock) -> str | None:
    """What a scheduler still has of a job, in words."""
    if run.job is None:
        return None
    return _backend(run.job.backend, environ, clock).standing(run.job.launch)


def scheduler_words(
    run: Run, leader_alive: bool, environ: Mapping[str, str], clock: Clock
) -> tuple[str | None, bool]:
    """Which job of a scheduler it is and, where no leader says more, how that stands; and whether
    the scheduler may still bring it up again."""
    if run.job is None or run.job.backend == "local":
        return None, False
    backend = _backend(run.job.backend, environ, clock)
    name = backend.name_of(run.job.launch)
    if leader_alive or run.ending is not None:
        return name, False
    try:
        standing = backend.standing(run.job.launch)
    except BackendError as exc:
        return f"{name or 'the job'}: cannot be told, {exc.message}", True
    # Without a name it may be that it is being submitted at this moment.
    gone = f"{name} has ended" if name else None
    return standing or gone, standing is not None


def _archive(run_root: Path, run_dir: RunDir, clock: Clock) -> None:
    import secrets

    stamp = datetime.fromtimestamp(clock.now(), UTC).strftime("%Y%m%dT%H%M%SZ")
    archive = run_root / ARCHIVE
    archive.mkdir(exist_ok=True)
    run_dir.path.rename(archive / f"{run_dir.path.name}-{stamp}-{secrets.token_hex(2)}")


def submitted_event(
    submission: Submission, past: Run, at: float, exclude: Sequence[str] = ()
) -> JobSubmitted:
    spec = submission.planned.spec
    resilience = spec.resilience
    number = past.job.launch.launch + 1 if past.job else 1
    plans = max(past.current.number + 1, number) if past.job else number
    return JobSubmitted(
        at=at,
        backend=spec.cluster.backend,
        steps=spec.train.steps,
        plan=submission.planned.plan,
        plan_number=plans,
        launch=launch_of(submission, number, exclude),
        max_restarts=resilience.max_restarts,
        hang_timeout=None if resilience.hang_timeout == "auto" else resilience.hang_timeout,
        init_timeout=INIT_TIMEOUT_S
        if resilience.init_timeout == "auto"
        else resilience.init_timeout,
        stop_grace=resilience.stop_grace,
        drills=submission.drills,
        resume=past.job is not None,
        shrink=resilience.shrink,
        min_hosts=resilience.min_hosts,
        preflight=_preflight(spec),
    )


def _preflight(spec: JobSpec) -> bool:
    wanted = spec.resilience.preflight
    return spec.cluster.backend != "local" if wanted == "auto" else wanted


def _trainer_config(submission: Submission) -> TrainingConfig:
    from orchestrator.plan.training import trainer_config

    planned = submission.planned
    out = str(submission.run_dir.path)
    return trainer_config(planned.spec, planned.plan, planned.model_config, out)


def _write_files(submission: Submission, number: int) -> None:
    from orchestrator.load import dump_spec
    from orchestrator.plan.show.explain import plan_json

    run_dir, planned = submission.run_dir, submission.planned
    run_dir.spec.write_text(dump_spec(planned.spec))
    run_dir.plan(number).write_text(json.dumps(plan_json(planned.plan), indent=2))
    config = encode(_trainer_config(submission))
    run_dir.trainer_config(number).write_text(json.dumps(config, indent=2))
    if not run_dir.token.exists():
        import secrets

        fd = os.open(run_dir.token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_urlsafe(32))


def cancel(run_dir: RunDir, environ: Mapping[str, str], clock: Clock) -> str:
    """Ask the leader to stop; without one, end what is left. What was done, in words."""
    run = fold(entry.event for entry in read(run_dir.journal))
    name = run_dir.path.name
    if run.ending is not None:
        raise JobError(f"job {name} has already ended: {run.state}", fix="nothing to cancel")
    if run.job is None:
        raise JobError(f"job {name} was never submitted to its end", fix="submit it again")
    if has_writer(run_dir.journal) and _ask_to_cancel(run_dir, run.job.launch.launch):
        return f"{name} is being cancelled: its ranks write a checkpoint and leave"
    _clear(run, environ, clock)
    return _record_cancel(run_dir, clock)


def _ask_to_cancel(run_dir: RunDir, launch: int) -> bool:
    """Whether the leader took the order."""
    import urllib.error  # late, as is getpass and secrets: `ndctl plan` needs none of them
    import urllib.request

    try:
        leader = json.loads(run_dir.leader.read_text())
        if leader["launch"] != launch:
            return False  # of an earlier launch; another program may have its port by now
        request = urllib.request.Request(
            f"http://{leader['address']}:{leader['port']}{CANCEL_PATH}",
            data=json.dumps({"by": _user()}).encode(),
            headers={
                "Authorization": f"Bearer {run_dir.token.read_text().strip()}",
                "Content-Type": "application/json",
            },
        )
        with urllib.request.urlopen(request, timeout=CANCEL_TIMEOUT_S) as answer:
            return bool(answer.status == 202)
    except urllib.error.HTTPError as exc:
        raise BackendError(
            f"the leader refused to cancel: {exc.code} {exc.reason}",
            fix=f"use the token in {run_dir.token}",
        ) from exc
    except (OSError, ValueError, KeyError):
        return False


def clear_host(run_root: Path, host: str, cluster: str | None, clock: Clock) -> str:
    """Say that a host is in order again. Raises JobError when nothing is held against it."""
    from orchestrator import strikes

    now = clock.now()
    found = [
        name
        for name, held in strikes.records(run_root, now).items()
        if cluster in (None, name) and any(record.host == host for record in held)
    ]
    if not found:
        raise JobError(
            f"nothing is held against {host} in {(run_root / strikes.FOLDER).absolute()}",
            fix="`ndctl hosts` lists the hosts with strikes; is --run-root the right one?",
        )
    for name in found:
        cleared = strikes.Cleared(at=now, host=host, by=_user())
        strikes.record(strikes.path_of(run_root, name), cleared)
    return f"{host} has no strikes any more in {', '.join(found)}"


def wait_until_ended(run_dir: RunDir, environ: Mapping[str, str], clock: Clock) -> str:
    """Wait for the end of a job that was cancelled; its state and why, in words.

    A scheduler has nothing of it any more then.
    """
    alive = True
    while (run := fold(entry.event for entry in read(run_dir.journal))).ending is None:
        if not alive:
            raise JobError(
                f"the leader of {run_dir.path.name} went away before the job had ended",
                fix=f"type `ndctl cancel {run_dir.path.name}` again",
            )
        clock.sleep(ENDING_POLL_S)
        alive = has_writer(run_dir.journal)  # asked before the journal is read, which it ends
    leaving = clock.monotonic()
    while _standing(run, environ, clock) is not None and clock.monotonic() - leaving < LEAVE_S:
        clock.sleep(ENDING_POLL_S)
    if run.job is not None and run.job.backend != "local":
        _clear(run, environ, clock)
    return f"{run_dir.path.name}: {run.state}, {run.reason}"


def _record_cancel(run_dir: RunDir, clock: Clock) -> str:
    """The journal of a job without a leader gets its end from here."""
    from orchestrator.contract.events import CancelRequested, LeaderStarted
    from orchestrator.supervise.loop import Supervisor

    with Journal(run_dir.journal, clock) as journal:
        supervisor = Supervisor(journal)
        assert supervisor.run.job is not None
        host = supervisor.run.job.launch.leader
        supervisor.feed(LeaderStarted(at=clock.now(), host=host, pid=os.getpid()))
        supervisor.feed(CancelRequested(at=clock.now(), by=_user()))
    return f"{run_dir.path.name} had no leader any more; what was left of it has been ended"


def _user() -> str:
    import getpass

    return getpass.getuser()
