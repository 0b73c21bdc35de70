"""Where a job stands: for a script, and for a person at 3 a.m."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import tzinfo
from typing import Any

from orchestrator.contract.codec import encode
from orchestrator.contract.mesh import AXES
from orchestrator.dashboard import format
from orchestrator.dashboard.next_steps import look_at, next_step
from orchestrator.dashboard.snapshot import Snapshot
from orchestrator.dashboard.view import (
    TROUBLE,
    CheckpointView,
    View,
    last_step,
)
from orchestrator.job.hosts.straggler_replacement import why_slow
from orchestrator.job.incident import Incident
from orchestrator.job.stage import ENDED, State


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
        "excluded": dict(snapshot.excluded),
        "attempt": snapshot.seen.attempt,
        "restarts": run.history.restarts,
        "max_restarts": job.max_restarts,
        "step": last_step(run, snapshot.progress),
        "steps": job.steps,
        "loss": last.loss if last else None,
        "tokens_per_second": last.tokens_per_second if last else None,
        "eta_s": shown.eta_s,
        "hosts": list(run.attempt.placement or run.plan.hosts),
        "world_size": run.plan.world_size,
        "mesh": dict(zip(AXES, run.plan.mesh.degrees, strict=True)),
        "stragglers": [encode(found) for found in shown.stragglers],
        "incidents": [incident_json(incident) for incident in run.history.incidents],
        "checkpoint": _checkpoint_json(snapshot),
        "drills": [{"drill": text, "fired": fired} for text, fired in shown.drills],
        "leader_alive": None if standing.as_of is not None else snapshot.leader_alive,
        "submitted_at": job.at,
        "updated_at": snapshot.heard_at,
        "run_dir": str(snapshot.run_dir.path),
    }


def incident_json(incident: Incident) -> dict[str, Any]:
    body: dict[str, Any] = encode(incident)
    return body


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
    """Under twelve lines: what, where, since when, what ndctl did, what to type next.

    Args:
        described: it is the head of what `ndctl describe` prints.
    """
    shown, standing = snapshot.view, snapshot.standing
    ago = format.duration(snapshot.now - standing.since)
    lines = [
        *state_lines(shown.name, standing.state, standing.reason, _age(shown, zone)),
        row("since", f"{format.moment(standing.since, zone)} ({ago} ago)"),
        *scheduler(snapshot, zone),
        *(row("excluded", f"{host} {why}") for host, why in snapshot.excluded.items()),
        row("progress", _progress(shown)),
        row("where", where(snapshot)),
        row("restarts", restarts(snapshot)),
        row("checkpoint", checkpoint_words(shown.checkpoint, shown)),
        *(row("trouble", line) for line in _trouble(shown)),
        *(row("straggler", line) for line in _slowest(shown)),
        *_last_incident(shown, zone),
        row("run dir", str(snapshot.run_dir.path)),
        *(row("see why", command) for command in _see_why(snapshot, described)),
        row("next", next_step(snapshot, zone)),
    ]
    return "\n".join(lines)


def state_lines(name: str, state: State, reason: str, age: str = "") -> list[str]:
    """The state and why, and on a line of its own what to do about it. `age`: of the state, where
    it is not known now."""
    why, fix = format.why_and_fix(reason)
    said = f"{state}{age}; {why}" if age else f"{state}, {why}"
    return [f"{name}: {said}", *([row("fix:", fix)] if fix else [])]


def _age(shown: View, zone: tzinfo | None) -> str:
    """Of a state that cannot be asked for now."""
    if shown.as_of is None:
        return ""
    ago = format.duration(shown.now - shown.as_of)
    return f" as of {format.moment(shown.as_of, zone)} ({ago} ago)"


def scheduler(snapshot: Snapshot, zone: tzinfo | None) -> Iterator[str]:
    """Unless that is the reason of the state, which stands above."""
    if snapshot.scheduler is None or snapshot.scheduler == snapshot.standing.reason:
        return
    granted = snapshot.seen.run.scheduler.allocation
    ends_at = granted.ends_at if granted is not None and snapshot.leader_alive else None
    limit = ""
    if ends_at is not None and ends_at > snapshot.now:
        left = format.duration(ends_at - snapshot.now)
        limit = f", whose allocation ends at {format.moment(ends_at, zone)}, in {left}"
    yield row("scheduler", snapshot.scheduler + limit)


def row(label: str, text: str) -> str:
    return f"  {label:<12}{text}"


def _progress(shown: View) -> str:
    parts = [f"step {shown.step:,} of {shown.steps:,}"]
    if shown.loss is not None:
        parts.append(f"loss {format.loss(shown.loss)}")
    if shown.state == "RUNNING" and shown.tokens_per_second is not None:
        parts.append(format.rate(shown.tokens_per_second))
    if shown.eta_s is not None:
        parts.append(f"about {format.duration(shown.eta_s)} left")
    return ", ".join(parts)


def where(snapshot: Snapshot) -> str:
    run, job = snapshot.seen.run, snapshot.seen.run.job
    assert job is not None
    names = run.attempt.placement or run.plan.hosts
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4:,} more" if len(names) > 4 else "")
    ranks, hosts = format.count(run.plan.world_size, "rank"), format.count(len(names), "host")
    return f"{ranks} on {hosts} ({shown}), {run.plan.mesh}, backend {job.backend}"


def restarts(snapshot: Snapshot) -> str:
    run, job = snapshot.seen.run, snapshot.seen.run.job
    assert job is not None
    budget = f"{run.history.fruitless} of {job.max_restarts} without a new checkpoint"
    restarts = format.count(run.history.restarts, "restart")
    return f"attempt {snapshot.seen.attempt}, {restarts} ({budget})"


def checkpoint_words(found: CheckpointView, shown: View) -> str:
    rest = "".join(f"; passed over {p.name}: {p.why}" for p in found.passed_over)
    if found.failed is not None:
        why, times = format.shortened(found.failed.why), found.failed.times
        row_of = f", as did {times - 1:,} before it in a row" if times > 1 else ""
        rest = f"; warning: the save at step {found.failed.step:,} failed{row_of}: {why}{rest}"
    if not found.step:
        return f"none yet{rest}"
    behind = max(0, shown.step - found.step)
    ages = [format.count(behind, "step")] if behind else []
    ages += [format.duration(shown.now - found.at)] if found.at is not None else []
    age = f", {' and '.join(ages)} ago" if ages else ""
    return f"{found.name} is complete{age}{rest}"


def _trouble(shown: View) -> Iterator[str]:
    """Hosts on which something is wrong now."""
    if shown.state not in ("RUNNING", "STARTING", "RECOVERING"):
        return
    bad = [host for host in shown.hosts if host.worst in TROUBLE and host.worst != "straggler"]
    if bad:
        named = ", ".join(f"{host.name} {host.worst}" for host in bad[:4])
        yield named + (f" and {len(bad) - 4:,} more hosts" if len(bad) > 4 else "")


def _slowest(shown: View) -> Iterator[str]:
    """The dearest of the ranks that keep their peers waiting."""
    if shown.stragglers:
        first, others = shown.stragglers[0], len(shown.stragglers) - 1
        rest = f" (and {format.count(others, 'more rank')})" if others else ""
        yield f"{first.host}: {why_slow(first)}{rest}"


def _last_incident(shown: View, zone: tzinfo | None) -> Iterator[str]:
    if not shown.incidents:
        return
    last = shown.incidents[-1]
    rest = f" ({len(shown.incidents) - 1} earlier)" if len(shown.incidents) > 1 else ""
    drill = f" [drill {last.drill}]" if last.drill else ""
    at = format.moment(last.at, zone)
    known = last.cause in shown.reason  # which stands above, as the state's reason
    cause = last.kind if known else f"{last.kind}: {format.one_line(last.cause)}"
    yield row("incident", f"{at} {cause}; {format.blamed(last.culprit)}{drill}{rest}")
    yield row("ndctl did", f"{did(last, shown.reason)}; {times(last, shown.state)}")


def did(incident: Incident, reason: str) -> str:
    """What ndctl did about it, and by which rule; `reason` is why the job stands where it stands,
    which is not said twice."""
    told = reason.startswith(incident.action)
    action = "stopped the job" if told else format.one_line(incident.action)
    return f"{action} (rule {incident.rule})" if incident.rule else action


def times(incident: Incident, state: State) -> str:
    """What the incident cost; `state` is the job's."""
    seen = format.detected(incident.detected_after_s)
    if incident.recovered_after_s is None:
        return f"{seen}, {'not recovered' if state in ENDED else 'not yet recovered'}"
    return f"{seen}, recovered after {format.duration(incident.recovered_after_s)}"


def _see_why(snapshot: Snapshot, described: bool) -> Iterator[str]:
    if snapshot.standing.state == "FAILED":
        command = look_at(snapshot)
        if command is not None:
            yield command
        elif not described:
            yield snapshot.commands.of("describe")


def stale_reasons(snapshots: Iterable[Snapshot]) -> list[str]:
    """Why jobs are shown as they were last known, each reason once."""
    counts = Counter(one.standing.reason for one in snapshots if one.standing.as_of is not None)
    return [
        f"{reason}; {format.count(count, 'job')} shown as last known"
        for reason, count in counts.items()
    ]


def list_rows(snapshots: Iterable[Snapshot]) -> list[dict[str, Any]]:
    """`ndctl list --json`; newest first."""
    keys = (
        "name",
        "state",
        "step",
        "steps",
        "attempt",
        "restarts",
        "loss",
        "updated_at",
        "scheduler",
        "as_of",
        "reason",
    )
    rows = [{key: body[key] for key in keys} for body in map(status_json, snapshots)]
    return sorted(rows, key=lambda row: -float(row["updated_at"]))


def list_text(rows: Sequence[Mapping[str, Any]], zone: tzinfo | None, now: float) -> str:
    head = ("NAME", "STATE", "STEP", "ATTEMPT", "RESTARTS", "LOSS", "UPDATED", "SCHEDULER")
    table = [head, *(_cells(body, zone, now) for body in rows)]
    if not any(body["scheduler"] for body in rows):
        table = [cells[:-1] for cells in table]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in table
    )


def _cells(body: Mapping[str, Any], zone: tzinfo | None, now: float) -> tuple[str, ...]:
    as_of = body["as_of"]
    age = "" if as_of is None else f" {format.duration(now - as_of)} ago"
    return (
        body["name"],
        body["state"] + age,
        f"{body['step']}/{body['steps']}",
        str(body["attempt"]),
        str(body["restarts"]),
        format.loss(body["loss"]),
        format.moment(body["updated_at"], zone),
        (body["scheduler"] or "-").split(":")[0],
    )
