"""One job at one moment: for a script, and for a person at 3 a.m."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import tzinfo
from pathlib import Path
from typing import Any

from orchestrator.contract.codec import encode
from orchestrator.contract.mesh import AXES
from orchestrator.contract.rundir import RunDir
from orchestrator.dashboard import words
from orchestrator.dashboard.commands import Commands
from orchestrator.dashboard.metrics import Progress, glance
from orchestrator.dashboard.recalled import look
from orchestrator.dashboard.view import (
    CheckpointView,
    Seen,
    Standing,
    View,
    effective_state,
    last_step,
    view,
)
from orchestrator.supervise import log
from orchestrator.supervise.policy import BUDGET
from orchestrator.supervise.replacing import why_slow
from orchestrator.supervise.roster import gives_back_at, is_short, usable
from orchestrator.supervise.state import ENDED, Incident, Run, Stage, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What `status`, `describe` and `list` say of a job is all in here."""

    run_dir: RunDir
    seen: Seen
    progress: Progress
    leader_alive: bool
    now: float
    scheduler: str | None = None
    """What a scheduler calls the job and, while it has no leader, says of it."""
    held: bool = False
    """The scheduler still has it, or cannot be asked: it waits for a leader."""
    known_by: Commands | None = None
    """What finds it from where ndctl was asked, where its name alone may not."""

    @property
    def commands(self) -> Commands:
        run_dir = self.run_dir
        return self.known_by or Commands(job=run_dir.path.name, spec=str(run_dir.spec))

    @property
    def checkpoints(self) -> Path:
        """Where the hosts have them: what is read here may be a copy of the journal alone."""
        here, job = self.run_dir.checkpoints, self.seen.run.job
        return (
            here if job is None or here.exists() else RunDir(Path(job.launch.run_dir)).checkpoints
        )

    @property
    def is_local(self) -> bool:
        """There is no scheduler to ask."""
        job = self.seen.run.job
        return job is None or job.backend == "local"

    @property
    def view(self) -> View:
        return view(
            self.seen,
            self.progress,
            leader_alive=self.leader_alive,
            now=self.now,
            held=self._held_words,
            commands=self.commands,
        )

    @property
    def standing(self) -> Standing:
        run, fix = self.seen.run, self.commands.submit()
        gone = self.scheduler is not None and not self.held and not self.leader_alive
        if gone and run.stage is Stage.SUBMITTED:
            reason = f"no leader ever started: {self.scheduler}"
            return Standing(state="FAILED", reason=reason, since=run.last_at, fix=fix)
        return effective_state(run, self.leader_alive, self.now, fix, self._held_words)

    @property
    def _held_words(self) -> str | None:
        return self.scheduler if self.held else None


def read_snapshot(run_dir: RunDir, now: float, commands: Commands | None = None) -> Snapshot | None:
    """None when the journal has no line yet: nobody has submitted the job.

    Whether a leader lives is asked before the journal is read: one that ends in between has
    written its end by then.
    """
    alive = log.has_writer(run_dir.journal)
    seen = look(run_dir)
    if seen.run.job is None:
        return None
    progress = glance(run_dir.metrics)
    return Snapshot(
        run_dir=run_dir,
        seen=seen,
        progress=progress,
        leader_alive=alive,
        now=now,
        known_by=commands,
    )


def status_json(snapshot: Snapshot) -> dict[str, Any]:
    run, job, last = snapshot.seen.run, snapshot.seen.run.job, snapshot.progress.last
    assert job is not None
    standing, shown = snapshot.standing, snapshot.view
    return {
        "name": job.launch.job,
        "state": standing.state,
        "reason": standing.reason,
        "fix": standing.fix,
        "since": standing.since,
        "backend": job.backend,
        "scheduler": snapshot.scheduler,
        "attempt": run.attempt,
        "restarts": run.restarts,
        "max_restarts": job.max_restarts,
        "step": last_step(run, snapshot.progress),
        "steps": job.steps,
        "loss": last.loss if last else None,
        "tokens_per_second": last.tokens_per_second if last else None,
        "eta_s": shown.eta_s,
        "hosts": list(run.placement or run.plan.hosts),
        "world_size": run.plan.world_size,
        "mesh": dict(zip(AXES, run.plan.mesh.degrees, strict=True)),
        "stragglers": [encode(found) for found in shown.stragglers],
        "incidents": [incident_json(incident) for incident in run.incidents],
        "checkpoint": _checkpoint_json(snapshot),
        "drills": [{"drill": text, "fired": fired} for text, fired in shown.drills],
        "leader_alive": snapshot.leader_alive,
        "submitted_at": job.at,
        "updated_at": updated_at(snapshot),
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


def updated_at(snapshot: Snapshot) -> float:
    """The job's last sign of life."""
    last = snapshot.progress.last
    return max(snapshot.seen.run.last_at, (last.time if last else None) or 0.0)


def status_text(snapshot: Snapshot, zone: tzinfo | None, *, described: bool = False) -> str:
    """Under twelve lines: what, where, since when, what ndctl did, what to type next.

    Args:
        described: it is the head of what `ndctl describe` prints.
    """
    shown, standing = snapshot.view, snapshot.standing
    ago = words.duration(snapshot.now - standing.since)
    lines = [
        f"{shown.name}: {standing.state}, {words.one_line(standing.reason)}",
        row("since", f"{words.moment(standing.since, zone)} ({ago} ago)"),
        *scheduler(snapshot, zone),
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


def scheduler(snapshot: Snapshot, zone: tzinfo | None) -> Iterator[str]:
    if snapshot.scheduler is None:
        return
    granted = snapshot.seen.run.allocation
    ends_at = granted.ends_at if granted is not None and snapshot.leader_alive else None
    limit = ""
    if ends_at is not None and ends_at > snapshot.now:
        left = words.duration(ends_at - snapshot.now)
        limit = f", whose allocation ends at {words.moment(ends_at, zone)}, in {left}"
    yield row("scheduler", snapshot.scheduler + limit)


def row(label: str, text: str) -> str:
    return f"  {label:<12}{text}"


def _progress(shown: View) -> str:
    parts = [f"step {shown.step:,} of {shown.steps:,}"]
    if shown.loss is not None:
        parts.append(f"loss {words.loss(shown.loss)}")
    if shown.state == "RUNNING" and shown.tokens_per_second is not None:
        parts.append(words.rate(shown.tokens_per_second))
    if shown.eta_s is not None:
        parts.append(f"about {words.duration(shown.eta_s)} left")
    return ", ".join(parts)


def where(snapshot: Snapshot) -> str:
    run, job = snapshot.seen.run, snapshot.seen.run.job
    assert job is not None
    names = run.placement or run.plan.hosts
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4:,} more" if len(names) > 4 else "")
    ranks, hosts = words.count(run.plan.world_size, "rank"), words.count(len(names), "host")
    return f"{ranks} on {hosts} ({shown}), {run.plan.mesh}, backend {job.backend}"


def restarts(snapshot: Snapshot) -> str:
    run, job = snapshot.seen.run, snapshot.seen.run.job
    assert job is not None
    budget = f"{run.fruitless} of {job.max_restarts} without a new checkpoint"
    return f"attempt {run.attempt}, {words.count(run.restarts, 'restart')} ({budget})"


def checkpoint_words(found: CheckpointView, shown: View) -> str:
    rest = "".join(f"; passed over {p.name}: {p.why}" for p in found.passed_over)
    if found.failed is not None:
        why = words.shortened(found.failed.why)
        rest = f"; warning: the save at step {found.failed.step:,} failed: {why}{rest}"
    if not found.step:
        return f"none yet{rest}"
    behind = max(0, shown.step - found.step)
    ages = [words.count(behind, "step")] if behind else []
    ages += [words.duration(shown.now - found.at)] if found.at is not None else []
    age = f", {' and '.join(ages)} ago" if ages else ""
    return f"{found.name} is complete{age}{rest}"


def _trouble(shown: View) -> Iterator[str]:
    """Hosts on which something is wrong now."""
    if shown.state not in ("RUNNING", "STARTING", "RECOVERING"):
        return
    bad = [host for host in shown.hosts if host.worst in ("dead", "silent", "slow")]
    if bad:
        named = ", ".join(f"{host.name} {host.worst}" for host in bad[:4])
        yield named + (f" and {len(bad) - 4:,} more hosts" if len(bad) > 4 else "")


def _slowest(shown: View) -> Iterator[str]:
    """The dearest of the ranks that keep their peers waiting."""
    if shown.stragglers:
        first, others = shown.stragglers[0], len(shown.stragglers) - 1
        rest = f" (and {words.count(others, 'more rank')})" if others else ""
        yield f"{first.host}: {why_slow(first)}{rest}"


def _last_incident(shown: View, zone: tzinfo | None) -> Iterator[str]:
    if not shown.incidents:
        return
    last = shown.incidents[-1]
    rest = f" ({len(shown.incidents) - 1} earlier)" if len(shown.incidents) > 1 else ""
    drill = f" [drill {last.drill}]" if last.drill else ""
    at = words.time_of_day(last.at, zone)
    cause = words.one_line(last.cause)
    yield row("incident", f"{at} {last.kind}: {cause}; culprit {last.culprit}{drill}{rest}")
    yield row("ndctl did", f"{did(last, shown.reason)}; {times(last, shown.state)}")


def did(incident: Incident, reason: str) -> str:
    """What ndctl did about it, and by which rule; `reason` is why the job stands where it stands,
    which is not said twice."""
    told = reason.startswith(incident.action)
    action = "stopped the job" if told else words.one_line(incident.action)
    return f"{action} (rule {incident.rule})" if incident.rule else action


def times(incident: Incident, state: State) -> str:
    """What the incident cost; `state` is the job's."""
    seen = words.detected(incident.detected_after_s)
    if incident.recovered_after_s is None:
        return f"{seen}, {'not recovered' if state in ENDED else 'not yet recovered'}"
    return f"{seen}, recovered after {words.duration(incident.recovered_after_s)}"


def next_step(snapshot: Snapshot, zone: tzinfo | None) -> str:
    """What a person should type now: words, and behind them one whole command."""
    run, standing, commands = snapshot.seen.run, snapshot.standing, snapshot.commands
    if snapshot.leader_alive and is_short(run):
        return _short(run, commands, snapshot.now, zone)
    match standing.state:
        case "SUBMITTED":
            return f"wait for the leader; if it does not come: {commands.of('logs')}"
        case "PENDING" if snapshot.held:
            since = f" for hosts since {words.moment(run.short_since, zone)}{_given_back(run)}"
            cancel = commands.of("cancel")
            return f"wait{since if run.given_back else ''}; to give it up: {cancel}"
        case "PENDING":
            here = sum(host.alive for host in run.hosts.values())
            return f"wait: {here} of {words.count(len(run.plan.hosts), 'host')} registered"
        case "STARTING" | "RUNNING":
            return f"nothing; to watch it: {commands.of('dashboard')}"
        case "RECOVERING":
            return f"nothing, ndctl is on it; to watch: {commands.of('dashboard')}"
        case "SUCCEEDED":
            return f"nothing; the whole story: {commands.of('describe')}"
        case "CANCELLED":
            return f"to go on from the checkpoint: {commands.submit()}"
        case _ if standing.fix:
            return standing.fix
        case _:
            return _go_on(run, commands)


def _go_on(run: Run, commands: Commands) -> str:
    """Of a job that failed: with what does not lead there again, where that is known."""
    last = run.incidents[-1] if run.incidents else None
    if last is None:
        return commands.submit()
    if last.edits:
        return commands.submit(last.edits[0])
    stopped = last.remedy == "stop" and last.rule != BUDGET
    return f"{'once that is mended: ' if stopped else ''}{commands.submit()}"


def _short(run: Run, commands: Commands, now: float, zone: tzinfo | None) -> str:
    """Of a job that waits for hosts which a scheduler may yet replace."""
    assert run.job is not None
    since = run.short_since if run.given_back else run.since
    there, want = len(usable(run)), words.count(len(run.plan.hosts), "host")
    due_at = gives_back_at(run)
    assert due_at is not None
    ways = f"to give it up: {commands.of('cancel')}"
    if not run.job.shrink:
        ways += f", and then with fewer: {commands.submit('--set resilience.shrink=true')}"
    return (
        f"wait: {there} of {want} are there, since {words.moment(since, zone)}"
        f" ({words.duration(now - since)}){_given_back(run)};"
        f" in vain until {words.moment(max(due_at, now), zone)} all are given back; {ways}"
    )


def _given_back(run: Run) -> str:
    return f", all given back {words.count(run.given_back, 'time')}" if run.given_back else ""


def look_at(snapshot: Snapshot) -> str | None:
    """The command that shows the log of who is to blame; None where that is nobody's."""
    run = snapshot.seen.run
    if snapshot.standing.fix:
        return snapshot.commands.of("logs", "--agents", "--tail", 20)
    return log_of(run.incidents[-1], snapshot.commands) if run.incidents else None


def log_of(incident: Incident, commands: Commands) -> str | None:
    """The same of one incident: by default `ndctl logs` shows another attempt."""
    rank = incident.culprit.rank
    if rank is None:
        return None
    return commands.of("logs", "--rank", rank, "--attempt", incident.attempt)


def _see_why(snapshot: Snapshot, described: bool) -> Iterator[str]:
    if snapshot.standing.state == "FAILED":
        command = look_at(snapshot)
        if command is not None:
            yield command
        elif not described:
            yield snapshot.commands.of("describe")


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
    )
    rows = [{key: body[key] for key in keys} for body in map(status_json, snapshots)]
    return sorted(rows, key=lambda row: -float(row["updated_at"]))


def list_text(rows: Sequence[Mapping[str, Any]], zone: tzinfo | None) -> str:
    head = ("NAME", "STATE", "STEP", "ATTEMPT", "RESTARTS", "LOSS", "UPDATED", "SCHEDULER")
    table = [head, *(_cells(body, zone) for body in rows)]
    if not any(body["scheduler"] for body in rows):
        table = [cells[:-1] for cells in table]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in table
    )


def _cells(body: Mapping[str, Any], zone: tzinfo | None) -> tuple[str, ...]:
    return (
        body["name"],
        body["state"],
        f"{body['step']}/{body['steps']}",
        str(body["attempt"]),
        str(body["restarts"]),
        words.loss(body["loss"]),
        words.moment(body["updated_at"], zone),
        (body["scheduler"] or "-").split(":")[0],
    )
