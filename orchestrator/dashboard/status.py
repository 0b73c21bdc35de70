"""`ndctl status`, as text and as JSON."""

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import tzinfo
from typing import Any, Self

from msgspec.structs import replace

from orchestrator.contract.codec import encode
from orchestrator.contract.mesh import AXES
from orchestrator.dashboard import format
from orchestrator.dashboard.job_view.health import UNHEALTHY, host_text
from orchestrator.dashboard.job_view.replayed_job import CheckpointView
from orchestrator.dashboard.job_view.standing import Standing
from orchestrator.dashboard.job_view.view import View, last_step
from orchestrator.dashboard.measured.against_plan import measured_json, measured_rows
from orchestrator.dashboard.next_steps import log_command, next_step
from orchestrator.dashboard.snapshot import Snapshot
from orchestrator.dashboard.time_spent.account import TimeSpent
from orchestrator.dashboard.time_spent.read import time_spent
from orchestrator.job.hosts.straggler_replacement import why_slow
from orchestrator.job.hosts.warned_hosts import words_of
from orchestrator.job.incident import STOPPED, Incident
from orchestrator.job.stage import ENDED, State, Submitted

MOST_WARNINGS = 4
"""Warnings of hosts that `status` shows; `describe` and `--json` have all."""


class Row(str):
    """A line of a report, which keeps its parts for views that lay them out differently."""

    label: str
    text: str

    def __new__(cls, line: str, label: str, text: str) -> Self:
        made = super().__new__(cls, line)
        made.label, made.text = label, text
        return made


def status_json(snapshot: Snapshot) -> dict[str, Any]:
    run, job, last = snapshot.seen.run, snapshot.seen.run.job, snapshot.progress.last
    assert job is not None
    standing, shown = snapshot.standing, snapshot.view
    return {
        "name": job.launch.job,
        "state": standing.state,
        "reason": standing.reason,
        "as_of": standing.as_of,
        "fix": standing.fix,
        "since": standing.since,
        "backend": job.backend,
        "scheduler": snapshot.scheduler,
        # Of a queued job the scheduler knows more, such as the command that allows a host again.
        "excluded": {**run.hosts.exclude, **snapshot.excluded},
        "attempt": snapshot.seen.attempt,
        "restarts": run.history.restarts,
        "max_restarts": job.max_restarts,
        "step": last_step(run, snapshot.progress),
        "steps": job.steps,
        "loss": last.loss if last else None,
        "tokens_per_second": shown.tokens_per_second,
        "eta_s": shown.eta_s,
        "time": time_json(time_spent(snapshot)),
        "measured": measured_json(run.plan, snapshot.steady),
        "hosts": list(snapshot.seen.hosts),
        "world_size": run.plan.world_size,
        "mesh": dict(zip(AXES, run.plan.mesh.degrees, strict=True)),
        "stragglers": [encode(found) for found in shown.stragglers],
        "warnings": [encode(found) for found in shown.warnings],
        "incidents": [incident_json(incident) for incident in run.history.incidents],
        "ignored_events": dict(run.history.ignored),
        "checkpoint": _checkpoint_json(snapshot),
        "drills": [{"drill": text, "fired": fired} for text, fired in shown.drills],
        "leader_alive": None if standing.as_of is not None else snapshot.leader_alive,
        "group": job.group or None,
        "submitted_at": job.at,
        "updated_at": snapshot.heard_at,
        "run_dir": str(snapshot.run_dir.path),
    }


def time_json(time: TimeSpent) -> dict[str, Any]:
    return {
        "elapsed_s": time.elapsed_s,
        "effective_s": time.effective_s,
        "effective_ratio": time.ratio,
        "lost_s": dict(time.lost_s),
    }


def incident_json(incident: Incident) -> dict[str, Any]:
    return {**encode(incident), "lost_steps": incident.lost_steps}


def _checkpoint_json(snapshot: Snapshot) -> dict[str, Any] | None:
    found = snapshot.seen.checkpoint
    if not found.step and not found.passed_over and found.failed is None:
        return None
    return {
        "step": found.step or None,
        "name": found.name if found.step else None,
        "path": str(snapshot.checkpoints / found.name) if found.step else None,
        "at": found.at,
        "age_s": None if found.at is None else max(0.0, snapshot.now - found.at),
        "passed_over": encode(found.passed_over),
        "failed": encode(found.failed),
    }


def status_text(snapshot: Snapshot, zone: tzinfo | None, *, described: bool = False) -> str:
    """About twelve lines: state, place, time, last incident, what ndctl did, the next command.

    Args:
        described: the text is the first section of `ndctl describe`.
    """
    standing, age = snapshot.standing, age_text(snapshot, zone)
    return "\n".join(
        [
            *state_lines(snapshot.view.name, standing.state, standing.reason, age),
            *status_rows(snapshot, zone, time_spent(snapshot), described=described),
        ]
    )


def status_rows(
    snapshot: Snapshot,
    zone: tzinfo | None,
    time: TimeSpent,
    view: View | None = None,
    *,
    described: bool = False,
) -> list[Row]:
    """The lines of `status_text` below the state.

    Args:
        view: `snapshot.view` if the caller has it: for thousands of hosts it takes milliseconds.
    """
    shown, standing = view or snapshot.view, snapshot.standing
    ago = format.duration(snapshot.now - standing.since)
    return [
        row("since", f"{format.date_time(standing.since, zone)} ({ago} ago)"),
        *scheduler(snapshot, zone),
        *(row("excluded", f"{host} {why}") for host, why in snapshot.excluded.items()),
        row("progress", _progress(shown)),
        *_effective(time, shown),
        *(row(*said) for said in measured_rows(snapshot.seen.run.plan, snapshot.steady)),
        row("where", where(snapshot)),
        *_group(snapshot),
        row("restarts", restarts(snapshot)),
        row("checkpoint", checkpoint_text(shown.checkpoint, shown)),
        *(row("unhealthy", line) for line in _unhealthy_hosts(shown)),
        *(row("straggler", line) for line in _worst_straggler(shown)),
        *(row("warning", words_of(one)) for one in shown.warnings[:MOST_WARNINGS]),
        *(row("draining", text) for text in _draining_hosts(snapshot)),
        *_last_incident(shown, zone),
        row("run dir", str(snapshot.run_dir.path)),
        *(row("see why", command) for command in _log_commands(snapshot, described)),
        row("next", next_step(snapshot, zone)),
    ]


def state_lines(name: str, state: State, reason: str, age: str = "") -> list[str]:
    """The state and its reason, then the fix on its own line.

    Args:
        age: how old the state is, if it is not known at present.
    """
    why, fix = format.split_fix(reason)
    said = f"{state}{age}; {why}" if age else f"{state}, {why}"
    return [f"{name}: {said}", *([row("fix:", fix)] if fix else [])]


def age_text(snapshot: Snapshot, zone: tzinfo | None) -> str:
    """How old the state is; empty if it is current."""
    as_of = snapshot.standing.as_of
    if as_of is None:
        return ""
    ago = format.duration(snapshot.now - as_of)
    return f" as of {format.date_time(as_of, zone)} ({ago} ago)"


def scheduler(snapshot: Snapshot, zone: tzinfo | None) -> Iterator[Row]:
    if snapshot.scheduler is None or snapshot.scheduler == snapshot.standing.reason:
        return  # the first line already says it
    granted = snapshot.seen.run.scheduler.allocation
    ends_at = granted.ends_at if granted is not None and snapshot.leader_alive else None
    limit = ""
    if ends_at is not None and ends_at > snapshot.now:
        left = format.duration(ends_at - snapshot.now)
        until = f"granted until {format.date_time(ends_at, zone)}, in {left}"
        # Slurm does not tell the leader if a person changes the time limit later.
        limit = f", {until}, unless its time limit was changed"
    yield row("scheduler", snapshot.scheduler + limit)


def row(label: str, text: str) -> Row:
    return Row(f"  {label:<12}{text}", label, text)


def progress_steps(shown: View) -> str:
    if shown.is_own and not shown.step:
        return "no step reported" if shown.state in ENDED else "no step reported yet"
    return f"step {format.steps(shown.step, shown.steps)}"


def _progress(shown: View) -> str:
    parts = [progress_steps(shown)]
    if shown.loss is not None:
        parts.append(f"loss {format.loss(shown.loss)}")
    if shown.state == "RUNNING" and shown.tokens_per_second is not None:
        parts.append(format.rate(shown.tokens_per_second))
    elif shown.state == "RUNNING" and shown.step_s:
        parts.append(f"{1 / shown.step_s:.3g} steps/s")
    if shown.state == "RUNNING":
        parts += format.use(shown.peak_memory_bytes, shown.gpu_utilization)
    if shown.late_s is not None:
        parts.append(f"last step {format.duration(shown.late_s)} ago")
    if shown.eta_s is not None:
        later = "" if shown.state == "RUNNING" else " once it trains"
        parts.append(f"about {format.duration(shown.eta_s)} left{later}")
    return ", ".join(parts)


def _effective(time: TimeSpent, shown: View) -> Iterator[Row]:
    """The share of time that is training, and the causes of lost time, the largest first."""
    if time.ratio is None or not time.effective_s:
        return
    if shown.state == "FAILED" and not shown.step:
        return  # ranks of the user's own program were alive, but nothing shows that they trained
    named = format.lost_time(time.lost_s.items())
    lost = f"; lost: {named}" if named else ""
    yield row("effective", f"{time.ratio:.1%} of {format.duration(time.elapsed_s)}{lost}")


def where(snapshot: Snapshot) -> str:
    run, job = snapshot.seen.run, snapshot.seen.run.job
    assert job is not None
    names = snapshot.seen.hosts
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4:,} more" if len(names) > 4 else "")
    ranks, hosts = format.count(run.plan.world_size, "rank"), format.count(len(names), "host")
    on = "on"
    if not snapshot.leader_alive and not run.attempt.placement:
        on = "planned for"
    elif not snapshot.leader_alive and snapshot.standing.state in ("SUBMITTED", "PENDING"):
        on = "last on"
    return f"{ranks} {on} {hosts} ({shown}), {run.plan.split}, backend {job.backend}"


def _group(snapshot: Snapshot) -> Iterator[Row]:
    """The group of the job, such as its sweep, and the command that lists all of it."""
    job = snapshot.seen.run.job
    if job is not None and job.group:
        others = replace(snapshot.commands, job=job.group).of("list")
        yield row("group", f"{job.group}; all its jobs: `{others}`")


def restarts(snapshot: Snapshot) -> str:
    run, job = snapshot.seen.run, snapshot.seen.run.job
    assert job is not None
    budget = f"{run.history.fruitless} of at most {job.max_restarts} without a new checkpoint"
    restarts = format.count(run.history.restarts, "restart")
    return f"attempt {snapshot.seen.attempt}, {restarts} ({budget})"


RESUMING = "to resume, it must load what ndctl.latest_checkpoint() returns"
"""Scripts such as trl's sft.py save checkpoints and never load one."""


def checkpoint_text(found: CheckpointView, shown: View) -> str:
    rest = "".join(f"; skipped {p.name}: {p.why}" for p in found.passed_over)
    if found.failed is not None:
        why, times = format.shorten(found.failed.why), found.failed.times
        row_of = f" ({times:,} failed saves in a row)" if times > 1 else ""
        rest = f"; warning: the save at step {found.failed.step:,} failed{row_of}: {why}{rest}"
    if shown.unused:
        rest += f"; your program did not load step-{shown.unused}, it started at step 0: {RESUMING}"
    if not found.step:
        known = " that ndctl knows" if shown.is_own and not shown.unused else ""
        return f"none{known}{rest}" if shown.state in ENDED else f"none{known} yet{rest}"
    behind = max(0, shown.step - found.step)
    ages = [format.count(behind, "step")] if behind else []
    ages += [format.duration(shown.now - found.at)] if found.at is not None else []
    age = f", {' and '.join(ages)} ago" if ages else ""
    return f"{found.name} is complete{age}{rest}"


def _unhealthy_hosts(shown: View) -> Iterator[str]:
    """Hosts with a failed, silent or late rank, or without agent. Stragglers have their own row."""
    if shown.state not in ("RUNNING", "STARTING", "RECOVERING"):
        return
    bad = [host for host in shown.hosts if host.worst in UNHEALTHY and host.worst != "straggler"]
    if bad:
        named = ", ".join(f"{host.name}: {host_text(host)}" for host in bad[:4])
        yield named + (f" and {len(bad) - 4:,} more hosts" if len(bad) > 4 else "")


def _draining_hosts(snapshot: Snapshot) -> list[str]:
    """Hosts that their scheduler drains and lets finish the job."""
    kept = "the job keeps it until it ends or is queued again"
    draining = snapshot.seen.run.hosts.draining.values() if snapshot.leader_alive else ()
    return [f"{words}; {kept}" for words in draining][:MOST_WARNINGS]


def _worst_straggler(shown: View) -> Iterator[str]:
    """The straggler that costs the most time."""
    if shown.stragglers:
        first, others = shown.stragglers[0], len(shown.stragglers) - 1
        rest = f" (and {format.count(others, 'more rank')})" if others else ""
        yield f"{first.host}: {why_slow(first)}{rest}"


def _last_incident(shown: View, zone: tzinfo | None) -> Iterator[Row]:
    if not shown.incidents:
        return
    last = shown.incidents[-1]
    rest = f" ({len(shown.incidents) - 1} earlier)" if len(shown.incidents) > 1 else ""
    drill = f" [drill {last.drill}]" if last.drill else ""
    at = format.date_time(last.at, zone)
    known = last.is_told_by(shown.reason)  # the first line already says it, as reason of the state
    cause = last.kind if known else f"{last.kind}: {format.one_line(last.cause)}"
    yield row("incident", f"{at} {cause}; {format.culprit_text(last.culprit)}{drill}{rest}")
    yield row(
        "ndctl did", f"{action_taken(last, shown.reason)}; {recovery_text(last, shown.state)}"
    )


def action_taken(incident: Incident, reason: str) -> str:
    """What ndctl did about the incident, and by which rule.

    Args:
        reason: reason of the job's state, which is printed elsewhere and not repeated.
    """
    # While the job restarts, its reason begins with the action too, but the job was not stopped.
    repeated = incident.remedy == "stop" and reason.startswith(incident.action)
    action = STOPPED if repeated else format.one_line(incident.decided)
    return f"{action} (rule {incident.rule})" if incident.rule else action


def is_open(incident: Incident, state: State) -> bool:
    """Whether the job in `state` has not recovered from the incident. For a program that
    reports no steps, ndctl knows only that its ranks run again, or that it succeeded."""
    return incident.resumed_after_s is None and state not in ("RUNNING", "SUCCEEDED")


def recovery_text(incident: Incident, state: State) -> str:
    """How long detection and recovery took; `state` is the state of the job."""
    seen = format.detection_delay(incident.detected_after_s)
    if is_open(incident, state):
        return f"{seen}, {'not recovered' if state in ENDED else 'not yet recovered'}"
    if incident.recovered_after_s is None and incident.runs_after_s is not None:
        return f"{seen}, all ranks ran again after {format.duration(incident.runs_after_s)}"
    if incident.recovered_after_s is None:
        return f"{seen}; the recovery was not timed, because no step was reported after it"
    return f"{seen}, recovered after {format.duration(incident.recovered_after_s)}"


def lost_work(incident: Incident) -> str | None:
    """Steps that are done again; None if no rank ran, or none reported a step. Until the ranks
    resume, the newest checkpoint on disk is a bound: hosts may have a newer one in memory."""
    lost = incident.lost_steps
    if lost is None or not incident.step:  # a program may report no steps
        return None
    bound = "at most " if lost and incident.recovered_after_s is None else ""
    return f"{bound}{format.count(lost, 'step')} of work lost"


def _log_commands(snapshot: Snapshot, described: bool) -> Iterator[str]:
    if snapshot.standing.state == "FAILED":
        command = log_command(snapshot)
        if command is not None:
            yield command
        elif not described and not isinstance(snapshot.seen.run.stage, Submitted):
            yield snapshot.commands.of("describe")


def stale_reasons(unknown: Iterable[Standing]) -> list[str]:
    """Why the states of some jobs are unknown; each reason once."""
    counts = Counter(one.reason for one in unknown)
    return [
        f"{reason}; {format.count(count, 'job')} shown with the last known state"
        for reason, count in counts.items()
    ]
