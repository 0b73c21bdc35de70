"""The command that the user should type next, and the command that shows why a job failed."""

import shlex
from datetime import tzinfo

from orchestrator.dashboard import format
from orchestrator.dashboard.command_hints import Commands
from orchestrator.dashboard.follow.logs import agent_files, are_empty, log_files
from orchestrator.dashboard.job_view.replayed_job import FailedSave
from orchestrator.dashboard.job_view.standing import awaited_jobs
from orchestrator.dashboard.snapshot import Snapshot
from orchestrator.diagnosis.cause.exits import DISK_FULL
from orchestrator.job.failures.policy import BUDGET, HANG
from orchestrator.job.hosts.host_pool import gives_back_at, is_short
from orchestrator.job.incident import PREFLIGHT, Incident
from orchestrator.job.stage import Ended, Submitted
from orchestrator.job.state import Run, usable


def next_step(snapshot: Snapshot, zone: tzinfo | None) -> str:
    """The next step for the user: an instruction, then one complete command."""
    run, standing, commands = snapshot.seen.run, snapshot.standing, snapshot.commands
    if standing.as_of is not None:
        return _retry_status(snapshot)
    if snapshot.leader_alive and snapshot.disk_is_full and not isinstance(run.stage, Ended):
        return _full_disk(snapshot)
    if snapshot.leader_alive and is_short(run):
        return _short(run, commands, snapshot.now, zone)
    if snapshot.end_unconfirmed:
        return f"to end what its scheduler may still have of it: {commands.of('cancel')}"
    match standing.state:
        case "SUBMITTED" | "PENDING":
            return _wait(snapshot, zone)
        case "STARTING" | "RUNNING":
            return _while_it_runs(snapshot, zone)
        case "RECOVERING":
            return f"no action needed, ndctl is recovering it; to watch: {commands.of('dashboard')}"
        case "SUCCEEDED":
            return _after_success(snapshot)
        case "CANCELLED":
            return f"to {_newest(snapshot)}: {commands.submit()}"
        case _:
            return standing.fix or _resume_after_failure(run, commands)


def _full_disk(snapshot: Snapshot) -> str:
    """For a job whose leader writes an event before it acts, and waits until it can."""
    failed = snapshot.seen.checkpoint.failed
    advice = failed.advice if failed is not None and failed.advice else "free disk space"
    return (
        f"{advice}: the disk of {snapshot.run_dir.path} is full, so the leader cannot write its"
        " journal and decides nothing until it can; the state above may be old"
    )


def _while_it_runs(snapshot: Snapshot, zone: tzinfo | None) -> str:
    failed, late_s = snapshot.seen.checkpoint.failed, snapshot.view.late_s
    if failed is not None and snapshot.standing.state == "RUNNING":
        return _failing_saves(snapshot, failed, zone)
    if late_s is not None:
        return _late_step(snapshot, late_s)
    return f"no action needed; to watch: {snapshot.commands.of('dashboard')}"


def _late_step(snapshot: Snapshot, late_s: float) -> str:
    """For a job that trains and whose next step is late. A save or an evaluation may take long, and
    a hang is detected only after its limit."""
    shown, where = snapshot.view, snapshot.commands.of("snapshot")
    doing = "since the last step" if 0 < shown.steps <= shown.step else "without a step"
    return f"{format.duration(late_s)} {doing}; to see what the ranks do: {where}"


def _after_success(snapshot: Snapshot) -> str:
    if snapshot.view.is_own and not snapshot.view.step:
        files = log_files(snapshot.run_dir, snapshot.seen.attempt)
        if are_empty([file.path for file in files]):
            report = snapshot.commands.of("describe")
            return f"it reported no step and printed nothing; for the full report: {report}"
        # A program may print why it does nothing, such as too few GPUs, and return 0.
        return f"if it should have trained, see its output: {snapshot.commands.of('logs')}"
    return f"no action needed; for the full report: {snapshot.commands.of('describe')}"


def _newest(snapshot: Snapshot) -> str:
    """Where a cancelled job resumes."""
    saved = snapshot.seen.checkpoint
    if snapshot.seen.run.ending is not None or isinstance(snapshot.seen.run.stage, Submitted):
        origin = "where your program resumes" if snapshot.view.is_own else "from step 0"
        # A program that did not load a checkpoint before will not load this one either.
        loads = saved.step and not snapshot.view.unused
        return f"resume from {saved.name}" if loads else f"start again {origin}"
    # The scheduler cancelled the job and the journal here has no end. Its ranks may have saved
    # one more checkpoint that this journal does not list.
    later = f", {saved.name} or later" if saved.step else ", if there is one"
    return f"resume from the newest checkpoint{later}"


def _retry_status(snapshot: Snapshot) -> str:
    """For a job whose state is unknown, because its scheduler or its pods are unreachable."""
    again = f"to ask again: {snapshot.commands.of('status')}"
    fix = snapshot.launch_status.fix if snapshot.launch_status is not None else ""
    return f"{fix}\n{' ' * 14}{again}" if fix else again


def _wait(snapshot: Snapshot, zone: tzinfo | None) -> str:
    """For a job that has not started training."""
    run, commands = snapshot.seen.run, snapshot.commands
    if awaited_jobs(run):
        return f"wait; to give up: {commands.of('cancel')}"
    if snapshot.standing.state == "SUBMITTED":
        return f"wait for the leader to start; if it does not: {commands.of('logs', '--agents')}"
    if snapshot.launch_status is not None and snapshot.launch_status.needs:
        return f"{snapshot.launch_status.needs}; to give up: {commands.of('cancel')}"
    if snapshot.held:
        short_since = format.date_time(run.scheduler.short_since, zone)
        since = f" for hosts, since {short_since}{_releases(run)}"
        since = since if run.scheduler.given_back else ""
        return f"wait{since}; to give up: {commands.of('cancel')}"
    here = sum(host.alive for host in run.hosts.by_name.values())
    return f"wait: {here} of {format.count(len(run.plan.hosts), 'host')} registered"


def _failing_saves(snapshot: Snapshot, failed: FailedSave, zone: tzinfo | None) -> str:
    """For a job that trains but cannot save checkpoints."""
    saved = snapshot.seen.checkpoint
    advice = failed.advice
    # The metrics file may be on the same full disk and stop too, so take the later step.
    done = max(snapshot.view.step, failed.step)
    lost = format.count(max(0, done - saved.step), "step")
    kept = f"the last complete one is {saved.name}" if saved.step else "none is complete yet"
    return (
        f"{advice or 'fix the cause'}: saving checkpoints to {snapshot.checkpoints} fails since"
        f" {format.date_time(failed.since, zone)}; {kept}; {lost} of work at risk;"
        f" to watch: {snapshot.commands.of('dashboard')}"
    )


def _resume_after_failure(run: Run, commands: Commands) -> str:
    """For a failed job: how to resume it without the same failure, if a remedy is known."""
    # A host that failed its preflight check is an incident too, but it did not end the job.
    ours = run.history.incidents[run.history.forgiven :]
    last = next((one for one in reversed(ours) if one.kind != PREFLIGHT), None)
    if last is None:
        return commands.submit()
    if last.edits and last.kind == HANG:
        return f"if the program was slow and not stuck: {commands.submit(last.edits[0])}"
    if last.edits:
        return commands.submit(last.edits[0])
    # `stop` means that a restart cannot help until the user fixes something. A job that only
    # used up its restart budget can be resumed as it is.
    stopped = last.remedy == "stop" and last.rule != BUDGET
    if not stopped:
        return commands.submit()
    if last.failure == DISK_FULL:
        return f"free disk space, then: {commands.submit()}"
    # The mistake may be in a `--set` option instead of the spec file.
    where = " in the spec file or in the --set options" if commands.overrides else ""
    return f"fix the cause{where}, then: {commands.submit()}"


def _short(run: Run, commands: Commands, now: float, zone: tzinfo | None) -> str:
    """For a job that waits for replacement hosts from its scheduler."""
    assert run.job is not None
    since = run.scheduler.short_since if run.scheduler.given_back else run.stage.since
    there, want = len(usable(run)), format.count(len(run.plan.hosts), "host")
    due_at = gives_back_at(run)
    assert due_at is not None
    ways = f"to give up: {commands.of('cancel')}"
    # A user's program decides itself how its ranks share the work, so it cannot shrink.
    if not run.job.shrink and not run.is_own:
        fewer = commands.submit("--set resilience.shrink=true")
        ways += f"; after that, to train with fewer hosts: {fewer}"
    return (
        f"wait: {there} of {want} available since {format.date_time(since, zone)}"
        f" ({format.duration(now - since)}){_releases(run)}; if this does not change,"
        f" ndctl releases all hosts at {format.date_time(max(due_at, now), zone)}"
        f" and requeues the job; {ways}"
    )


def _releases(run: Run) -> str:
    times = format.count(run.scheduler.given_back, "time")
    return f", all hosts released {times} so far" if run.scheduler.given_back else ""


def log_command(snapshot: Snapshot) -> str | None:
    """The command that shows the log of the culprit, or of a rank that ended before the others;
    None if there is neither."""
    run = snapshot.seen.run
    if snapshot.standing.fix:
        return _leader_log_command(snapshot)
    incidents = run.history.incidents
    return incident_log_command(incidents[-1], snapshot) if incidents else None


def _leader_log_command(snapshot: Snapshot) -> str | None:
    """For a job whose leader is gone: the log of its agent has the reason. If no agent of a Slurm
    job opened its log, the newest output of the Slurm job has it; None if the job never started."""
    run_dir, job = snapshot.run_dir, snapshot.seen.run.job
    if job is None or not run_dir.slurm.is_dir() or agent_files(run_dir):
        return snapshot.commands.of("logs", "--agents", "--tail", 20)
    folder = run_dir.slurm / f"launch-{job.launch.launch}"
    printed = [path for path in folder.glob("*.[oe]*") if not are_empty([path])]
    if not printed:
        return None
    return f"tail -n 20 {shlex.quote(str(max(printed, key=lambda path: path.stat().st_mtime)))}"


def incident_log_command(incident: Incident, snapshot: Snapshot) -> str | None:
    """The command that shows the log of the incident's culprit, or of a rank that ended before the
    others; None if the log was removed, or if the rank printed nothing."""
    who, run = incident.evidence.ended or incident.culprit, snapshot.seen.run
    rank = who.rank
    assert run.job is not None
    if rank is None or incident.attempt <= run.attempt.number - run.job.keep_attempts:
        return None
    # One path and no search, because `describe` asks for each incident, and there may be thousands
    # of hosts.
    folder = snapshot.run_dir.attempt_logs(incident.attempt, who.host or "")
    if are_empty([folder / f"rank-{rank}.log"]):
        return None
    return snapshot.commands.of("logs", "--rank", rank, "--attempt", incident.attempt)
