"""What a person should type now, and where the reason of a failure stands."""

from datetime import tzinfo

from orchestrator.dashboard import format
from orchestrator.dashboard.command_hints import Commands
from orchestrator.dashboard.snapshot import Snapshot
from orchestrator.dashboard.view import FailedSave
from orchestrator.job.hosts.host_pool import gives_back_at, is_short, usable
from orchestrator.job.incident import PREFLIGHT, Incident
from orchestrator.job.policy import BUDGET
from orchestrator.job.state import Run


def next_step(snapshot: Snapshot, zone: tzinfo | None) -> str:
    """What a person should type now: words, and behind them one whole command."""
    run, standing, commands = snapshot.seen.run, snapshot.standing, snapshot.commands
    if standing.as_of is not None:
        return _ask_again(snapshot)
    if snapshot.leader_alive and is_short(run):
        return _short(run, commands, snapshot.now, zone)
    match standing.state:
        case "SUBMITTED" | "PENDING":
            return _wait(snapshot, zone)
        case "RUNNING" if snapshot.seen.checkpoint.failed is not None:
            return _at_risk(snapshot, snapshot.seen.checkpoint.failed, zone)
        case "STARTING" | "RUNNING":
            return f"nothing; to watch it: {commands.of('dashboard')}"
        case "RECOVERING":
            return f"nothing, ndctl is on it; to watch: {commands.of('dashboard')}"
        case "SUCCEEDED":
            return f"nothing; the whole story: {commands.of('describe')}"
        case "CANCELLED":
            return f"to {_newest(snapshot)}: {commands.submit()}"
        case _ if standing.fix:
            return standing.fix
        case _:
            return _go_on(run, commands)


def _newest(snapshot: Snapshot) -> str:
    """Where a job that was cancelled goes on."""
    saved = snapshot.seen.checkpoint
    if snapshot.seen.run.ending is not None:
        return f"go on from {saved.name}" if saved.step else "begin anew"
    # Its last words were not heard here, and its ranks may have written one more.
    later = f", {saved.name} or a later one" if saved.step else " if there is one"
    return f"go on from the newest checkpoint{later}"


def _ask_again(snapshot: Snapshot) -> str:
    """Of a job whose state is not known now: it may well train on."""
    again = f"{snapshot.commands.of('status')} asks again"
    fix = snapshot.sighting.fix if snapshot.sighting is not None else ""
    return f"{fix}\n{' ' * 14}{again}" if fix else again


def _wait(snapshot: Snapshot, zone: tzinfo | None) -> str:
    """Of a job that has not begun."""
    run, commands = snapshot.seen.run, snapshot.commands
    if snapshot.standing.state == "SUBMITTED":
        return f"wait for the leader; if it does not come: {commands.of('logs')}"
    if snapshot.held:
        since = (
            f" for hosts since {format.moment(run.scheduler.short_since, zone)}{_given_back(run)}"
        )
        since = since if run.scheduler.given_back else ""
        return f"wait{since}; to give it up: {commands.of('cancel')}"
    here = sum(host.alive for host in run.hosts.by_name.values())
    return f"wait: {here} of {format.count(len(run.plan.hosts), 'host')} registered"


def _at_risk(snapshot: Snapshot, failed: FailedSave, zone: tzinfo | None) -> str:
    """Of a job that trains, and whose checkpoints cannot be written."""
    saved = snapshot.seen.checkpoint
    advice = failed.advice
    done = max(snapshot.view.step, failed.step)  # metrics may lie on the same full disk
    lost = format.count(max(0, done - saved.step), "step")
    kept = f"{saved.name} is the last that is complete" if saved.step else "none is complete yet"
    return (
        f"{advice or 'mend why'}: no checkpoint can be written in {snapshot.checkpoints} since"
        f" {format.moment(failed.since, zone)}, {kept}, and {lost} of work at risk;"
        f" to watch it: {snapshot.commands.of('dashboard')}"
    )


def _go_on(run: Run, commands: Commands) -> str:
    """Of a job that failed: with what does not lead there again, where that is known."""
    ours = run.history.incidents[
        run.history.forgiven :
    ]  # why it failed is no host that was found wanting besides
    last = next((one for one in reversed(ours) if one.kind != PREFLIGHT), None)
    if last is None:
        return commands.submit()
    if last.edits:
        return commands.submit(last.edits[0])
    stopped = last.remedy == "stop" and last.rule != BUDGET
    if not stopped:
        return commands.submit()
    # What was set beside the file may be the very mistake.
    where = " in the file or the --set" if commands.overrides else ""
    return f"once that is fixed{where}: {commands.submit()}"


def _short(run: Run, commands: Commands, now: float, zone: tzinfo | None) -> str:
    """Of a job that waits for hosts which a scheduler may yet replace."""
    assert run.job is not None
    since = run.scheduler.short_since if run.scheduler.given_back else run.stage.since
    there, want = len(usable(run)), format.count(len(run.plan.hosts), "host")
    due_at = gives_back_at(run)
    assert due_at is not None
    ways = f"to give it up: {commands.of('cancel')}"
    if not run.job.shrink:
        ways += f", and then with fewer: {commands.submit('--set resilience.shrink=true')}"
    return (
        f"wait: {there} of {want} are there, since {format.moment(since, zone)}"
        f" ({format.duration(now - since)}){_given_back(run)};"
        f" in vain until {format.moment(max(due_at, now), zone)} all are given back; {ways}"
    )


def _given_back(run: Run) -> str:
    return (
        f", all given back {format.count(run.scheduler.given_back, 'time')}"
        if run.scheduler.given_back
        else ""
    )


def look_at(snapshot: Snapshot) -> str | None:
    """The command that shows the log of who is to blame; None where that is nobody's."""
    run = snapshot.seen.run
    if snapshot.standing.fix:
        return snapshot.commands.of("logs", "--agents", "--tail", 20)
    return (
        log_of(run.history.incidents[-1], run, snapshot.commands) if run.history.incidents else None
    )


def log_of(incident: Incident, run: Run, commands: Commands) -> str | None:
    """The same of one incident, None as well where its log was removed: by default `ndctl logs`
    shows another attempt."""
    rank = incident.culprit.rank
    assert run.job is not None
    if rank is None or incident.attempt <= run.attempt.number - run.job.keep_attempts:
        return None
    return commands.of("logs", "--rank", rank, "--attempt", incident.attempt)
