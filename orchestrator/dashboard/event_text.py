"""One line of text per journal entry: the event, the actions that followed and their reasons."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import tzinfo
from typing import assert_never

from orchestrator.contract.messages.actions import (
    Action,
    CheckHosts,
    EndJob,
    GatherEvidence,
    JudgeHang,
    ReplaceAgent,
    Replan,
    Requeue,
    SaveCheckpoint,
    StartAttempt,
    StopAttempt,
)
from orchestrator.contract.messages.events import (
    AgentLost,
    AgentRegistered,
    CancelRequested,
    CheckpointFailed,
    CheckpointIntervalChanged,
    CheckpointSaved,
    CheckpointSlow,
    DrillHappened,
    Event,
    EvidenceGathered,
    HangDetected,
    HangJudged,
    HangOver,
    HealthChanged,
    HostFlagged,
    HostLeaving,
    HostOpened,
    HostsChecked,
    HostStopped,
    HostUnavailable,
    HostWarned,
    JobSubmitted,
    JournalDelayed,
    LeaderStarted,
    LeaveAsked,
    LogGrew,
    MemoryCheckpointsSet,
    NoticeSent,
    ProgramRuns,
    RankExited,
    Replanned,
    ReplanRefused,
    RequeueRefused,
    RunDirLost,
    StepReached,
    StragglerFound,
    StragglerGone,
    Tick,
    TrainingResumed,
)
from orchestrator.dashboard import format
from orchestrator.diagnosis.cause.exits import after_step, signal_name
from orchestrator.job.hosts.straggler_replacement import why_slow
from orchestrator.job.incident import Incident
from orchestrator.journal.journal import Entry


def sort_by_time(entries: Iterable[Entry]) -> list[Entry]:
    """Entries with equal times keep the order of the journal, where a cause precedes its effect."""
    return sorted(entries, key=lambda entry: event_time(entry.event))


def event_time(event: Event) -> float:
    """The time to show for `event`."""
    # `at` of a stopped rank is its last heartbeat, possibly long before it was told to stop.
    # Show the time when its end was detected, so that it does not precede the order to stop.
    if isinstance(event, RankExited) and event.stopped:
        return event.at + event.detected_after_s
    return event.at


def event_line(entry: Entry, zone: tzinfo | None, more: Sequence[str] = ()) -> str:
    """`2026-01-09 14:03:22 UTC  rank 1 on host-0 was killed by SIGKILL -> stop attempt 1 (…)`.

    Args:
        more: what followed from the entry, beside its actions.
    """
    followed = (*map(describe_action, entry.actions), *more)
    line = " -> ".join((describe_event(entry.event), *followed))
    return f"{format.date_time(event_time(entry.event), zone)}  {format.one_line(line)}"


def describe_decision(incident: Incident) -> str:
    rule = f" (rule {incident.rule})" if incident.rule else ""
    what = f"incident {incident.id}, {incident.kind}: {incident.cause}"
    return f"{what}; {incident.decided}{rule}"


def describe_action(action: Action) -> str:  # noqa: C901 - a case a kind
    match action:
        case StartAttempt():
            return _start(action)
        case StopAttempt(attempt=attempt, grace_s=grace, reason=reason, hosts=hosts):
            where = f" on {', '.join(hosts)}" if hosts else ""
            return f"stop attempt {attempt}{where} within {format.duration(grace)} ({reason})"
        case SaveCheckpoint(reason=reason):
            return f"save a checkpoint at once ({reason})"
        case GatherEvidence(attempt=attempt, reason=reason):
            return f"collect evidence of attempt {attempt} ({reason})"
        case JudgeHang(attempt=attempt, reason=reason):
            return f"analyse the evidence of attempt {attempt} ({reason})"
        case ReplaceAgent(host=host, elsewhere=True, reason=reason):
            return f"request a host to replace {host} ({reason})"
        case ReplaceAgent(host=host, reason=reason):
            return f"request a new agent on {host} ({reason})"
        case CheckHosts(reason=reason):
            return f"check the hosts ({reason})"
        case Replan():
            return _replan(action)
        case Requeue(exclude=exclude, reason=reason, whole=whole):
            without = f" without {', '.join(exclude)}" if exclude else ""
            what = "requeue the job" if whole else "release the leader's host"
            return f"{what}{without} ({reason})"
        case EndJob(state=state, reason=reason):
            return f"end the job: {state} ({reason})"
        case _:
            assert_never(action)


def _start(action: StartAttempt) -> str:
    drills, skip = (", ".join(map(str, told)) for told in (action.drills, action.skip))
    armed = f", drills armed: {drills}" if drills else ""
    without = f", skipping data batches {skip}" if skip else ""
    return f"start {action.reason}{without}{_network_cost(action.crossing)}{armed}"


def _network_cost(crossing: tuple[int, ...]) -> str:
    """Network traffic of one step with this placement.

    Args:
        crossing: bytes per step that leave a host and, if known, that leave a leaf switch.
    """
    if not any(crossing):  # one host
        return ""
    leaf = f" ({format.size(crossing[1])} between leaf switches)" if len(crossing) > 1 else ""
    return f", network traffic per step: {format.size(crossing[0])} between hosts{leaf}"


def _notice(event: NoticeSent) -> str:
    whom = f"receiver {event.receiver} of {event.notice}"
    if event.delivered:
        return f"notified {whom} (try {event.tries})"
    if event.why == "quiet_for":
        return f"did not notify {whom}: quiet_for has not passed"
    return f"failed to notify {whom} (try {event.tries}): {event.why}"


def _replan(action: Replan) -> str:
    if action.device_bytes is None:
        return f"search for a plan with fewer hosts ({action.reason})"
    what = "a plan" if action.adopt else "spec changes"
    room = format.size(action.device_bytes)
    return f"search for {what} that need at most {room} per device ({action.reason})"


def describe_event(event: Event) -> str:  # noqa: C901, PLR0915 - one line for each event
    match event:
        case JobSubmitted():
            return _submitted(event)
        case LeaderStarted():
            return _leader(event)
        case AgentRegistered(host=host, address=address, devices=devices, pid=pid, findings=found):
            many = format.count(devices, "device")
            but = "".join(f"; {finding.verdict}: {finding.found}" for finding in found)
            stopped = "; a signal had stopped its former agent, which it killed"
            but += stopped if event.former_stopped else ""
            return f"agent of {host} registered from {address} with {many} (pid {pid}){but}"
        case AgentLost(host=host, taken=taken) if taken:
            return f"the scheduler removed {host} from the job: {taken}"
        case AgentLost(host=host, why=why, silent_s=silent):
            return f"agent of {host} lost: {why} (last message {format.duration(silent)} earlier)"
        case TrainingResumed():
            return _resumed(event)
        case ProgramRuns(attempt=attempt):
            return f"attempt {attempt}: all ranks run; the program has reported no step"
        case StepReached():
            return _step(event)
        case CheckpointSaved(step=step):
            return f"checkpoint step-{step} is complete"
        case CheckpointFailed(step=step, why=why):
            return f"warning: failed to save the checkpoint of step {step}: {format.shorten(why)}"
        case CheckpointSlow(step=step, took_s=took, usual_s=usual):
            kept = f"warning: training waited {format.duration(took)} for the checkpoint"
            return f"{kept} of step {step}; the checkpoints before took {format.duration(usual)}"
        case LogGrew(rank=rank, size=size, per_second=rate):
            grows = f"grows by {format.size(rate)}/s"
            full = "the run directory's disk may become full: print less"
            return f"warning: the log of rank {rank} has {format.size(size)} and {grows}; {full}"
        case NoticeSent():
            return _notice(event)
        case JournalDelayed(waited_s=waited, why=why):
            error = f" ({format.shorten(why)})" if why else ""
            late = format.duration(waited)
            return f"warning: a write of the journal took {late}{error}; decisions waited for it"
        case CheckpointIntervalChanged(old=old, new=new, why=why):
            many = format.count(new, "step")
            return f"checkpoint interval changed from {old} to {many}: {why}"
        case MemoryCheckpointsSet():
            return f"checkpoints in memory: {memory_use(event)}"
        case HealthChanged(ranks=spans, health=health, age_s=age):
            # One event covers all ranks that change at once; age_s is the oldest heartbeat.
            at_most = "at most " if spans[0][0] != spans[-1][1] else ""
            ago = f"last heartbeat {at_most}{format.duration(age)} ago"
            return f"{format.rank_spans(spans)}: {format.health_text(health)} ({ago})"
        case StragglerFound():
            return f"straggler on {event.host}: {why_slow(event)}"
        case StragglerGone(rank=rank, host=host, own_s=own, peers_s=peers):
            return (
                f"rank {rank} on {host} is no longer a straggler: {own:.3f} s of own work per"
                f" step, its peers {peers:.3f} s"
            )
        case DrillHappened(rank=rank, step=step):
            return f"a drill fired on rank {rank} at step {step}"
        case RankExited():
            return _exited(event)
        case HangDetected():
            return _hang(event)
        case HangOver(rank=rank, step=step, phase=phase):
            return (
                f"not a hang: rank {rank} makes progress again (step {step}, phase {phase});"
                " the attempt continues"
            )
        case EvidenceGathered(host=host, ranks=ranks):
            stacks = format.count(sum(bool(rank.stack) for rank in ranks), "stack")
            dumps = format.count(event.dumps, "flight recorder dump")
            of = f"{stacks} and {dumps} of {format.count(len(ranks), 'rank')}"
            lost = f"; missing: {', '.join(sorted(event.missing))}" if event.missing else ""
            ended = "".join(f"; rank {r} had ended ({how})" for r, how in event.ended.items())
            told = f"{format.shorten(ended)}{format.shorten(lost)}"
            return f"collected evidence on {host}: {of}{told}"
        case HangJudged():
            who = f"culprit rank {event.ranks[0]}" if event.ranks else "no culprit"
            sure = f"confidence {event.confidence:.0%}, analysed in {format.duration(event.took_s)}"
            return f"verdict {event.verdict}, {who} ({sure}): {format.shorten(event.cause)}"
        case HostStopped(host=host, kept=True):
            return f"all ranks on {host} left the attempt and wait for the next one"
        case HostStopped(host=host, finished=finished, why=why, killed=killed):
            how = "finished" if finished else "stopped"
            left = f"; {format.rank_list(killed)} did not end after SIGTERM" if killed else ""
            return f"all ranks on {host} {how}{left}{f': {_torchrun_end(why)}' if why else ''}"
        case CancelRequested(by=by):
            return (
                f"cancel requested by {by}" if event.led else f"cancelled by {by}, without a leader"
            )
        case LeaveAsked(cause=cause, words=said):
            # The leader asks the scheduler for the cause; until it answers the cause is empty.
            why = cause or "the cause is not known yet"
            return f"the scheduler asks the job to stop: {why} ({said})"
        case HostFlagged(host=host, state=state, reason=reason):
            return f"{host} is {state}{f': {reason}' if reason else ''}"
        case HostWarned(host=host, what=what, lasts=lasts):
            return f"{host} warns: {what}" if lasts else f"{host}: {what}"
        case RunDirLost(why=why):
            return why
        case HostOpened(host=host):
            return f"{host} is available again"
        case HostLeaving(host=host, why=why):
            return f"the scheduler is removing {host} from the job: {why}"
        case HostUnavailable(host=host, why=why):
            return f"{host} is unavailable and no longer waited for: {why}"
        case HostsChecked(unfit=unfit):
            failed = _hosts_with_reasons(unfit)
            return f"host check failed: {failed}" if failed else "host check: all hosts passed"
        case Replanned(plan=plan, plan_number=number, why=why):
            many = format.count(len(plan.hosts), "host")
            return f"plan {number} for {many}: {plan.split}{f', {why}' if why else ''}"
        case ReplanRefused():
            return _no_plan(event)
        case RequeueRefused(why=why):
            return f"the scheduler refused to requeue the job: {why}"
        case Tick():
            return "a deadline passed"
        case _:
            assert_never(event)


def _torchrun_end(why: str) -> str:
    """How torchrun ended, with the last line of its output if that says more than the event of the
    rank that failed."""
    first, *output = [line for line in why.splitlines() if line.strip()]
    if not output or any("ChildFailedError" in line for line in output):
        return first
    return f"{first}: {format.shorten(output[-1])}"


def _no_plan(event: ReplanRefused) -> str:
    if event.device_bytes is None:
        return f"no plan for {format.count(event.hosts, 'host')} or fewer: {event.why}"
    ways = f"; spec changes that help: {'; '.join(event.ways)}" if event.ways else ""
    room = format.size(event.device_bytes)
    return f"no plan needs at most {room} per device: {event.why}{ways}"


def _leader(event: LeaderStarted) -> str:
    if event.unable:
        return f"{event.host} cannot run the leader: {event.unable}"
    line = f"leader started on {event.host} (pid {event.pid})"
    if event.former:
        line += f"; it takes over: {event.former}"
    if event.allocation is None:
        return line
    given = event.allocation
    again = f", requeued {format.count(given.restarts, 'time')}" if given.restarts else ""
    left_out = f"; excluded: {_hosts_with_reasons(event.exclude)}" if event.exclude else ""
    many = format.count(len(given.hosts), "host")
    return f"{line} in allocation {given.id} ({many}{again}){left_out}"


def _hosts_with_reasons(hosts: Mapping[str, str]) -> str:
    return ", ".join(f"{host} ({why})" for host, why in sorted(hosts.items()))


def _work(event: JobSubmitted) -> str:
    return f"{event.steps:,} steps" if event.run is None else shlex.join(event.run.words)


def _submitted(event: JobSubmitted) -> str:
    verb = "resubmitted" if event.resume else "submitted"
    ranks = format.count(event.plan.world_size, "rank")
    hosts = format.count(len(event.plan.hosts), "host")
    drills = f", drills {', '.join(map(str, event.drills))}" if event.drills else ""
    return (
        f"job {event.launch.job} {verb} to {event.backend}: {_work(event)},"
        f" {ranks} on {hosts}, {event.plan.split}{drills}"
    )


def _resumed(event: TrainingResumed) -> str:
    passed = "".join(f"; skipped {p.name}: {p.why}" for p in event.passed_over)
    if not event.step:
        return f"attempt {event.attempt} starts training from step 0{passed}"
    if event.in_memory:
        return (
            f"attempt {event.attempt} resumes from step {event.step} in its hosts' memory{passed}"
        )
    return f"attempt {event.attempt} resumes from checkpoint step-{event.step}{passed}"


COPIES = {0: "no copy on another host", 1: "1 copy of each on another host"}


def memory_use(event: MemoryCheckpointsSet) -> str:
    """What checkpoints in memory take, or why there are none."""
    if event.copies is None:
        return f"none: {event.why}"
    copies = COPIES.get(event.copies, f"{event.copies} copies of each on other hosts")
    why = f"; {event.why}" if event.why else ""
    return f"{format.size(event.host_bytes)} of each host's memory, {copies}{why}"


def _step(event: StepReached) -> str:
    known = []
    if event.loss is not None:
        known.append(f"loss {format.loss(event.loss)}")
    if event.tokens_per_second is not None:
        known.append(format.rate(event.tokens_per_second))
    return ", ".join([f"attempt {event.attempt} reached step {event.step:,}", *known])


def _exited(event: RankExited) -> str:
    if event.error is not None:
        how = f"raised {format.shorten(event.error.said)}"
    elif event.above is not None and event.signal is not None:
        # The rank died because the process above it (torchrun, agent) died.
        how = f"was killed by {signal_name(event.signal)} together with its {event.above}"
    elif event.signal is not None:
        how = f"was killed by {signal_name(event.signal)}"
    elif event.exit_code is not None:
        how = f"exited with code {event.exit_code}"
    else:
        how = "was stopped" if event.stopped else "disappeared without an exit status"
    who = f"rank {event.rank} on {event.host}"
    if event.stopped:  # ndctl stopped it itself, so a detection delay means nothing
        return f"{who} {how} {after_step(event.step)} while ndctl stopped its attempt"
    delay = format.duration(event.detected_after_s)
    return f"{who} {how} {after_step(event.step)} (detected after {delay})"


def _hang(event: HangDetected) -> str:
    behind = f", {format.rank_list(event.behind)} behind" if event.behind else ""
    stalled, limit = format.duration(event.stalled_s), format.duration(event.limit_s)
    return (
        f"hang in phase {event.phase} at step {event.step}:"
        f" no progress for {stalled} (limit {limit}){behind}"
    )
