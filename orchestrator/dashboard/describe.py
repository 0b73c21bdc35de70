"""`ndctl describe`: everything that is known about a job, with each incident in full."""

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import tzinfo
from typing import Any

from orchestrator.contract.codec import encode
from orchestrator.contract.files.checkpoint_names import SkippedCheckpoint
from orchestrator.dashboard import format
from orchestrator.dashboard.event_text import memory_use
from orchestrator.dashboard.job_view.health import host_text
from orchestrator.dashboard.measured.against_plan import describe_rows
from orchestrator.dashboard.next_steps import incident_log_command
from orchestrator.dashboard.snapshot import Snapshot
from orchestrator.dashboard.status import (
    Row,
    action_taken,
    checkpoint_text,
    lost_work,
    recovery_text,
    row,
    status_json,
    status_text,
)
from orchestrator.diagnosis.cause.exits import after_step
from orchestrator.diagnosis.cause.verdict import NOBODY
from orchestrator.diagnosis.hang.report import where_words
from orchestrator.diagnosis.hang.verdicts import HangEvidence, RankFacts
from orchestrator.diagnosis.stacks.python_stacks import main_stack, main_thread, place, shortened
from orchestrator.job.failures.policy import HANG
from orchestrator.job.hosts.straggler_replacement import why_slow
from orchestrator.job.hosts.warned_hosts import outlook
from orchestrator.job.incident import Incident
from orchestrator.job.stage import ENDED, OUTSIDE
from orchestrator.job.state import Run
from orchestrator.plan.show.explain import plan_json

MAX_STACK_LINES = 12
MAX_STACKS = 16
MAX_HOSTS = 32


def describe_text(
    snapshot: Snapshot, zone: tzinfo | None, passed_over: Iterable[SkippedCheckpoint] = ()
) -> str:
    """The full report; `passed_over`: unusable checkpoints that are on disk at present."""
    sections = (
        ("", [status_text(snapshot, zone, described=True)]),
        ("Plan", _plan(snapshot)),
        ("Hosts", _hosts(snapshot)),
        ("Training", _training(snapshot)),
        ("Checkpoints", _checkpoints(snapshot, zone, passed_over)),
        ("Stragglers", _stragglers(snapshot, zone)),
        ("Warnings of hosts", _warnings(snapshot, zone)),
        ("Drills", _drills(snapshot)),
        ("Incidents", _incidents(snapshot, zone)),
        ("Ignored events", _ignored_events(snapshot.seen.run)),
        ("Files", _files(snapshot)),
    )
    blocks = ((title, list(lines)) for title, lines in sections)
    texts = ("\n".join(([title] if title else []) + lines) for title, lines in blocks if lines)
    return "\n\n".join(texts)


def describe_json(snapshot: Snapshot) -> dict[str, Any]:
    """The body of `status --json`, with the plan, the ranks of each host and the last metrics."""
    run, shown, last = snapshot.seen.run, snapshot.view, snapshot.progress.last
    agents = run.hosts.by_name
    return status_json(snapshot) | {
        "settings": list(_settings(snapshot)),
        "plan": plan_json(run.plan),
        "ranks": [
            {
                "host": host.name,
                "first_rank": host.first_rank,
                "health": list(host.ranks),
                "agent_pid": agents[host.name].pid if host.name in agents else None,
            }
            for host in shown.hosts
        ],
        "spares": list(shown.spares),
        "metrics": None if last is None else encode(last),
    }


def _settings(snapshot: Snapshot) -> Iterator[str]:
    """What `submit` changed in the spec file. Of a job of a sweep, these are its values too."""
    # A sweep also sets the name, which each report begins with.
    changes = snapshot.commands.overrides
    yield from (change for change in changes if not change.startswith("name="))


def _plan(snapshot: Snapshot) -> Iterator[str]:
    if settings := list(_settings(snapshot)):
        yield row("settings", " ".join(settings))
    current = snapshot.seen.run.current
    plan = current.plan
    ranks = format.count(plan.world_size, "rank")
    if plan.is_own:
        yield row("ranks", ranks)
        job = snapshot.seen.run.job
        assert job is not None
        assert job.run is not None
        yield row("program", shlex.join(job.run.words))
        yield row("folder", job.run.workdir)
        if (captured := job.launch.captured) is not None:
            yield row("runs", f"{captured.copy}, copied from {captured.folder} at submission")
        return
    assert plan.memory is not None
    yield row("mesh", f"{plan.mesh} ({ranks})")
    accumulation = f"gradient accumulation {plan.gradient_accumulation}"
    yield row("batch", f"micro batch {plan.micro_batch_size}, {accumulation}")
    peak = format.size(plan.memory.peak_bytes)
    yield row("memory", f"about {peak} at the peak on the rank with the highest use (estimate)")
    for note in plan.notes:
        yield row("note", note)
    yield row("file", str(snapshot.run_dir.plan(current.number)))


def _hosts(snapshot: Snapshot) -> Iterator[str]:
    run, shown = snapshot.seen.run, snapshot.view
    more = snapshot.commands.of("status", "--json")
    for host in shown.hosts[:MAX_HOSTS]:
        known = run.hosts.by_name.get(host.name)
        agent = f"agent pid {known.pid} at {known.address}" if known else "agent not registered"
        last = host.first_rank + len(host.ranks) - 1
        ranks = f"ranks {host.first_rank}-{last}" if len(host.ranks) > 1 else f"rank {last}"
        begun = run.attempt.number or snapshot.leader_alive
        health = host_text(host) if begun else "not started"
        yield row(host.name, f"{ranks}: {health}; {agent}")
    if len(shown.hosts) > MAX_HOSTS:
        yield row("…", f"{len(shown.hosts) - MAX_HOSTS:,} more: {more}")
    for spare in shown.spares:
        yield row(spare, "spare")
    yield from _excluded_hosts(run)


def _excluded_hosts(run: Run) -> Iterator[str]:
    for host, why in sorted(run.hosts.exclude.items()):
        yield row(host, f"excluded: {format.one_line(why)}")
    asked = run.job.launch.kubernetes if run.job else None
    kept_off = sorted({*run.hosts.exclude} - {*run.hosts.shut})
    # ndctl itself sets node affinity only on a PyTorchJob. For other kinds a running job's pods
    # can be kept off a node by the controller, or by a person.
    if kept_off and asked is not None and asked.kind != "pytorchjob":
        kept = f"`ndctl controller` keeps new pods of this {asked.kind} off these nodes"
        yield row("next", f"{kept}; if none runs: `kubectl cordon {' '.join(kept_off)}`")


def _training(snapshot: Snapshot) -> Iterator[str]:
    first, last = snapshot.progress.first, snapshot.progress.last
    if first is None or last is None:
        return
    # A program of the user may report steps and nothing else.
    if first.loss is not None or last.loss is not None:
        yield row("loss", f"{format.loss(first.loss)} at step {first.step:,}")
        yield row("", f"{format.loss(last.loss)} at step {last.step:,}")
    if snapshot.progress.step_s is not None:
        rate = snapshot.progress.tokens_per_second
        tokens = "" if rate is None else f", {format.rate(rate)}"
        yield row("speed", f"{format.duration(snapshot.progress.step_s)} per step{tokens}")
    yield from (row(*said) for said in describe_rows(snapshot.seen.run.plan, snapshot.steady))
    job = snapshot.seen.run.job
    # `effective` counts all launches.
    of = f", of launch {job.launch.launch}" if job is not None and job.launch.launch > 1 else ""
    yield row("elapsed", f"{format.duration(snapshot.view.elapsed_s)}{of}")


def _checkpoints(
    snapshot: Snapshot, zone: tzinfo | None, passed_over: Iterable[SkippedCheckpoint]
) -> Iterator[str]:
    found = snapshot.seen.checkpoint
    yield row("newest", checkpoint_text(found, snapshot.view))
    if found.at is not None:
        yield row("written", format.date_time(found.at, zone))
    if found.failed is not None:
        at = format.date_time(found.failed.at, zone)
        since = format.date_time(found.failed.since, zone)
        row_of = f" ({found.failed.times:,} failed saves in a row since {since})"
        many = row_of if found.failed.times > 1 else ""
        yield row("warning", f"the save at step {found.failed.step:,} failed at {at}{many}:")
        yield row("", format.one_line(found.failed.why))
    for passed in passed_over:
        yield row("skipped", f"{passed.name}: {passed.why}")
    run = snapshot.seen.run
    # That memory ends with the agents.
    gone = run.attempt.memory_lost or isinstance(run.stage, OUTSIDE)
    if run.attempt.memory is not None and not gone and snapshot.standing.state not in ENDED:
        yield row("in memory", memory_use(run.attempt.memory))


def _stragglers(snapshot: Snapshot, zone: tzinfo | None) -> Iterator[str]:
    """Each straggler: its cost, its start, the evidence, and what ndctl will do about it."""
    run = snapshot.seen.run
    assert run.job is not None
    for found in snapshot.view.stragglers[:MAX_STACKS]:
        yield row(found.host, why_slow(found))
        over = f"{format.count(found.steps, 'step')} of {format.duration(found.step_s)} each"
        yield row("", f"since {format.date_time(found.at, zone)}, measured over {over}")
        yield row("", _planned_action(run.job.replace_stragglers, snapshot.view.spares))
    if len(snapshot.view.stragglers) > MAX_STACKS:
        more = snapshot.commands.of("status", "--json")
        yield row("…", f"{len(snapshot.view.stragglers) - MAX_STACKS:,} more: {more}")


def _planned_action(replaces: bool, spares: tuple[str, ...]) -> str:
    if not replaces:
        return "not replaced: resilience.replace_stragglers is false"
    if not spares:
        return "not replaced: no spare host is free; cluster.spare_hosts requests spare hosts"
    return "ndctl moves its ranks to a spare host after the next checkpoint"


def _warnings(snapshot: Snapshot, zone: tzinfo | None) -> Iterator[str]:
    """What each host warns of, and what ndctl will do about it."""
    for one in snapshot.view.warnings:
        yield row(one.host, format.one_line(one.what))
        yield row("", f"since {format.date_time(one.at, zone)}")
        yield row("", outlook(snapshot.seen.run, one, snapshot.view.now))


def _drills(snapshot: Snapshot) -> Iterator[str]:
    for text, fired in snapshot.view.drills:
        yield row("fired" if fired else "armed", text)


def _incidents(snapshot: Snapshot, zone: tzinfo | None) -> Iterator[str]:
    for incident in reversed(snapshot.seen.run.history.incidents):
        yield from incident_rows(incident, snapshot, zone)


def incident_rows(incident: Incident, snapshot: Snapshot, zone: tzinfo | None) -> Iterator[str]:
    """Title and facts."""
    yield f"  {incident_title(incident, zone)}"
    yield from incident_facts(incident, snapshot)


def incident_title(incident: Incident, zone: tzinfo | None) -> str:
    drill = f" (drill {incident.drill})" if incident.drill else ""
    return f"#{incident.id} {incident.kind} at {format.date_time(incident.at, zone)}{drill}"


def incident_facts(incident: Incident, snapshot: Snapshot) -> Iterator[Row]:
    """Cause, culprit, evidence, what ndctl did, and what the incident cost. A row without a label
    continues the one above it."""
    yield row("  cause", format.one_line(incident.cause))
    sure = "" if incident.confidence is None else f" (confidence {incident.confidence:.0%})"
    culprit = "none" if incident.culprit == NOBODY else str(incident.culprit)
    yield row("  culprit", f"{culprit}{sure}")
    yield row("  when", f"attempt {incident.attempt}, {after_step(incident.step)}")
    if incident.failure:
        yield row("  class", f"{incident.failure} (scope {incident.scope})")
    standing = snapshot.standing
    yield row("  decision", action_taken(incident, standing.reason))
    yield row("  cost", f"{recovery_text(incident, standing.state)}{_lost_work(incident)}")
    if incident.in_memory:
        yield row("  resumed", f"from step {incident.saved:,} in the memory of the hosts")
    for skipped in incident.skipped:
        yield row("  skipped", f"{skipped.name}: {format.one_line(skipped.why)}")
    yield from _evidence(incident)
    if (log := incident_log_command(incident, snapshot)) is not None:
        yield row("  see why", log)
    if incident.edits:
        several = "resume with one of:" if len(incident.edits) > 1 else "resume:"
        # An option that helps only if the program was slow; the advice says so.
        yield row("  to do", f"{incident.advice}:" if incident.kind == HANG else several)
        for edits in incident.edits:
            yield row("", snapshot.commands.submit(edits))
    elif incident.advice:
        yield row("  to do", format.one_line(incident.advice))


def _lost_work(incident: Incident) -> str:
    lost = lost_work(incident)
    return "" if lost is None else f"; {lost}"


def _evidence(incident: Incident) -> Iterator[Row]:
    found = incident.evidence
    of_another = found.rank is not None and found.rank != incident.culprit.rank
    of = f" of rank {found.rank}" if of_another else ""
    if found.signal is not None:
        yield row("  evidence", f"signal {found.signal}{of}")
    elif found.exit_code is not None:
        yield row("  evidence", f"exit code {found.exit_code}{of}")
    # The rows `class` and `to do` have it, unless `to do` has commands.
    known = f"class {incident.failure} (scope {incident.scope}): {incident.advice}"
    for note in found.notes:
        if note != known or incident.edits:
            yield row("  evidence", format.one_line(note))
    if found.traceback:
        yield from _quoted(f"traceback{of}", found.traceback.splitlines())
    if found.log_tail:
        title = f"last lines of the log{of}" if of else "last lines of its log"
        yield from _quoted(title, found.log_tail)
    yield from _stacks(found.stacks, incident.culprit.rank)


def _stacks(found: Mapping[str, tuple[str, ...]], culprit: int | None) -> Iterator[Row]:
    """The culprit's stack in full; for the other ranks one line per place in the program."""
    whole = [str(culprit)] if str(culprit) in found else []
    if culprit is None:  # then show in full each rank that is at a place of its own
        alike = Counter(place(main_stack(stack)) for stack in found.values())
        whole = [rank for rank, stack in found.items() if alike[place(main_stack(stack))] == 1]
    # A stack that cannot be parsed has no place, so it is shown unchanged.
    whole += [rank for rank, stack in found.items() if not main_stack(stack) and rank not in whole]
    for rank in whole[:MAX_STACKS]:
        if stack := found[rank]:
            lines = shortened(main_thread(stack), MAX_STACK_LINES)
            yield from _quoted(f"stack of rank {rank}", lines)
    rest = {
        int(rank): RankFacts(rank=int(rank), stack=stack)
        for rank, stack in found.items()
        if rank not in whole[:MAX_STACKS]
    }
    for line in where_words(HangEvidence(facts=rest), ()):
        yield row("  stacks", format.one_line(line))


class Quoted(Row):
    """A line of a log, a traceback or a stack."""


def _quoted(title: str, lines: Iterable[str]) -> Iterator[Row]:
    yield Row(f"    {title}:", title, "")
    for line in lines:
        text = format.quoted(line)
        yield Quoted(f"      | {text}", "", text)


def _ignored_events(run: Run) -> Iterator[str]:
    for name, times in sorted(run.history.ignored.items()):
        yield row(format.count(times, "time"), f"{name}: this cannot happen, please report it")


def _files(snapshot: Snapshot) -> Iterator[str]:
    run, run_dir = snapshot.seen.run, snapshot.run_dir
    yield row("journal", str(run_dir.journal))
    yield row("metrics", str(run_dir.metrics))
    logs = run_dir.logs / f"attempt-{run.attempt.number}"
    yield row("logs", str(snapshot.on_hosts(logs)))
    if snapshot.standing.fix and run.scheduler.leader:
        leader_log = run_dir.agent_log(run.scheduler.leader)
        yield row("leader log", str(snapshot.on_hosts(leader_log)))
    if any(incident.evidence.stacks for incident in run.history.incidents):
        yield row("traces", str(snapshot.on_hosts(run_dir.path / "traces")))
