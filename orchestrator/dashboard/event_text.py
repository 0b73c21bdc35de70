"""The journal as a person reads it: one line for each event, with what was decided and why."""

from collections.abc import Iterable, Mapping
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
    JobSubmitted,
    LeaderStarted,
    LeaveAsked,
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
from orchestrator.job.hosts.straggler_replacement import why_slow
from orchestrator.journal.journal import Entry


def in_order_of_time(entries: Iterable[Entry]) -> list[Entry]:
    """What happened at one moment stays as the journal has it: the cause before what it led to."""
    return sorted(entries, key=lambda entry: _when(entry.event))


def _when(event: Event) -> float:
    """A rank that was told to stop was last heard before that, perhaps long before: it ended when
    it was seen to be gone."""
    if isinstance(event, RankExited) and event.stopped:
        return event.at + event.detected_after_s
    return event.at


def event_line(entry: Entry, zone: tzinfo | None) -> str:
    """`2026-01-09 14:03:22 UTC  rank 1 on host-0 was killed by SIGKILL -> stop attempt 1 (…)`."""
    decided = "".join(f" -> {action_words(action)}" for action in entry.actions)
    line = f"{event_words(entry.event)}{decided}"
    return f"{format.moment(_when(entry.event), zone)}  {format.one_line(line)}"


def action_words(action: Action) -> str:  # noqa: C901 - a case a kind
    match action:
        case StartAttempt():
            return _start(action)
        case StopAttempt(attempt=attempt, grace_s=grace, reason=reason, hosts=hosts):
            where = f" on {', '.join(hosts)}" if hosts else ""
            return f"stop attempt {attempt}{where} within {format.duration(grace)} ({reason})"
        case GatherEvidence(attempt=attempt, reason=reason):
            return f"gather evidence of attempt {attempt} ({reason})"
        case JudgeHang(attempt=attempt, reason=reason):
            return f"judge the evidence of attempt {attempt} ({reason})"
        case ReplaceAgent(host=host, elsewhere=True, reason=reason):
            return f"ask for another host in the place of {host} ({reason})"
        case ReplaceAgent(host=host, reason=reason):
            return f"ask for a new agent on {host} ({reason})"
        case CheckHosts(reason=reason):
            return f"check the hosts ({reason})"
        case Replan():
            return _look_for_plan(action)
        case Requeue(exclude=exclude, reason=reason, whole=whole):
            without = f" without {', '.join(exclude)}" if exclude else ""
            what = "back to the queue" if whole else "give the leader's host back"
            return f"{what}{without} ({reason})"
        case EndJob(state=state, reason=reason):
            return f"end the job: {state} ({reason})"
        case _:
            assert_never(action)


def _start(action: StartAttempt) -> str:
    drills, skip = (", ".join(map(str, told)) for told in (action.drills, action.skip))
    armed = f", drills armed: {drills}" if drills else ""
    without = f", without batches {skip} of the data" if skip else ""
    return f"start {action.reason}{without}{_crossing(action.crossing)}{armed}"


def _crossing(crossing: tuple[int, ...]) -> str:
    """What these hosts cost: bytes that leave a host in a step, and of these a leaf switch."""
    if not crossing:
        return ""
    leaf = f", {format.size(crossing[1])} a leaf switch" if len(crossing) > 1 else ""
    return f", a step sends {format.size(crossing[0])} out of hosts{leaf}"


def _look_for_plan(action: Replan) -> str:
    if action.device_bytes is None:
        return f"look for a smaller plan ({action.reason})"
    what = "a plan" if action.adopt else "ways out"
    room = format.size(action.device_bytes)
    return f"look for {what} within {room} a device ({action.reason})"


def event_words(event: Event) -> str:  # noqa: C901, PLR0915 - one line for each event
    match event:
        case JobSubmitted():
            return _submitted(event)
        case LeaderStarted():
            return _leader(event)
        case AgentRegistered(host=host, address=address, devices=devices, pid=pid, findings=found):
            many = format.count(devices, "device")
            but = "".join(f"; {finding.verdict}: {finding.found}" for finding in found)
            return f"agent of {host} registered from {address} with {many} (pid {pid}){but}"
        case AgentLost(host=host, taken=taken) if taken:
            return f"the scheduler took {host}: {taken}"
        case AgentLost(host=host, why=why, silent_s=silent):
            return f"agent of {host} lost: {why} (last heard {format.duration(silent)} before)"
        case TrainingResumed():
            return _resumed(event)
        case StepReached():
            return _step(event)
        case CheckpointSaved(step=step):
            return f"checkpoint step-{step} is complete"
        case CheckpointFailed(step=step, why=why):
            return f"warning: the checkpoint of step {step} failed: {format.shortened(why)}"
        case CheckpointIntervalChanged(old=old, new=new, why=why):
            many = format.count(new, "step")
            return f"a checkpoint every {many} from now on, before every {old}: {why}"
        case HealthChanged(ranks=spans, health=health, age_s=age):
            who, several = format.spans_in_words(spans), spans[0][0] != spans[-1][1]
            are, at_most = ("are", "at most ") if several else ("is", "")
            return f"{who} {are} {health} (last heard {at_most}{format.duration(age)} ago)"
        case StragglerFound():
            return f"straggler on {event.host}: {why_slow(event)}"
        case StragglerGone(rank=rank, host=host, own_s=own, peers_s=peers):
            return (
                f"rank {rank} on {host} keeps up again: {own:.3f} s of its own a step,"
                f" its peers {peers:.3f} s"
            )
        case DrillHappened(drill=drill, rank=rank, step=step):
            return f"drill {drill} happened to rank {rank} at step {step}"
        case RankExited():
            return _exited(event)
        case HangDetected():
            return _hang(event)
        case HangOver(rank=rank, step=step, phase=phase):
            return f"no hang: rank {rank} moves again, step {step}, {phase}; the attempt goes on"
        case EvidenceGathered(host=host, ranks=ranks):
            stacks = sum(bool(rank.stack) for rank in ranks)
            many = format.count(len(ranks), "rank")
            of = f"stacks of {stacks} and dumps of {event.dumps} of {many}"
            lost = f"; missing: {', '.join(sorted(event.missing))}" if event.missing else ""
            return f"{of} gathered on {host}{format.shortened(lost)}"
        case HangJudged():
            who = f"rank {event.ranks[0]}" if event.ranks else "nobody"
            sure = f"{event.confidence:.0%} sure, judged in {format.duration(event.took_s)}"
            return f"verdict {event.verdict}, {who} ({sure}): {format.shortened(event.cause)}"
        case HostStopped(host=host, finished=finished, why=why):
            how = "finished" if finished else "stopped"
            return f"all ranks on {host} {how}{f': {why}' if why else ''}"
        case CancelRequested(by=by):
            return f"cancel requested by {by}"
        case LeaveAsked(cause=cause, words=said):
            return f"the scheduler asks the job to leave: {cause or 'why is being asked'} ({said})"
        case HostFlagged(host=host, state=state, reason=reason):
            return f"{host} is {state}{f': {reason}' if reason else ''}"
        case RunDirLost(why=why):
            return why
        case HostOpened(host=host):
            return f"{host} is open again"
        case HostLeaving(host=host, why=why):
            return f"the scheduler takes {host} back: {why}"
        case HostUnavailable(host=host, why=why):
            return f"{host} is given up: {why}"
        case HostsChecked(unfit=unfit):
            return "the hosts were tried together: " + (_unfit(unfit) or "all are in order")
        case Replanned(plan=plan, plan_number=number, why=why):
            many = format.count(len(plan.hosts), "host")
            return f"plan {number} for {many}: {plan.mesh}{f', {why}' if why else ''}"
        case ReplanRefused():
            return _no_plan(event)
        case RequeueRefused(why=why):
            return f"the scheduler does not take the job back: {why}"
        case Tick():
            return "a deadline passed"
        case _:
            assert_never(event)


def _no_plan(event: ReplanRefused) -> str:
    if event.device_bytes is None:
        return f"no plan for {format.count(event.hosts, 'host')} or fewer: {event.why}"
    ways = f"; ways out: {'; '.join(event.ways)}" if event.ways else ""
    return f"no plan within {format.size(event.device_bytes)} a device: {event.why}{ways}"


def _leader(event: LeaderStarted) -> str:
    if event.unable:
        return f"{event.host} cannot lead: {event.unable}"
    line = f"leader started on {event.host} (pid {event.pid})"
    if event.allocation is None:
        return line
    given = event.allocation
    again = f", restart {given.restarts}" if given.restarts else ""
    left_out = f"; not used: {_unfit(event.exclude)}" if event.exclude else ""
    many = format.count(len(given.hosts), "host")
    return f"{line} in allocation {given.id}{again} of {many}{left_out}"


def _unfit(hosts: Mapping[str, str]) -> str:
    return ", ".join(f"{host} ({why})" for host, why in sorted(hosts.items()))


def _submitted(event: JobSubmitted) -> str:
    verb = "submitted again" if event.resume else "submitted"
    ranks = format.count(event.plan.world_size, "rank")
    hosts = format.count(len(event.plan.hosts), "host")
    drills = f", drills {', '.join(map(str, event.drills))}" if event.drills else ""
    return (
        f"job {event.launch.job} {verb} to {event.backend}: {event.steps:,} steps,"
        f" {ranks} on {hosts}, {event.plan.mesh}{drills}"
    )


def _resumed(event: TrainingResumed) -> str:
    origin = f"checkpoint step-{event.step}" if event.step else "the beginning"
    passed = "".join(f"; passed over {p.name}: {p.why}" for p in event.passed_over)
    return f"attempt {event.attempt} goes on from {origin}{passed}"


def _step(event: StepReached) -> str:
    known = []
    if event.loss is not None:
        known.append(f"loss {format.loss(event.loss)}")
    if event.tokens_per_second is not None:
        known.append(format.rate(event.tokens_per_second))
    return ", ".join([f"attempt {event.attempt} reached step {event.step:,}", *known])


def _exited(event: RankExited) -> str:
    if event.error is not None:
        how = f"raised {format.shortened(f'{event.error.error}: {event.error.message}')}"
    elif event.above is not None and event.signal is not None:
        how = f"went with its {event.above}, killed by {format.signal_name(event.signal)},"
    elif event.signal is not None:
        how = f"was killed by {format.signal_name(event.signal)}"
    elif event.exit_code is not None:
        how = f"left with exit code {event.exit_code}"
    else:
        how = "was ended" if event.stopped else "vanished"
    who = f"rank {event.rank} on {event.host}"
    if event.stopped:  # by ndctl, so there is nothing to have seen sooner
        return f"{who} {how} after step {event.step} as its attempt was stopped"
    seen_after = format.duration(event.detected_after_s)
    return f"{who} {how} after step {event.step} (seen after {seen_after})"


def _hang(event: HangDetected) -> str:
    behind = f", {format.ranks_in_words(event.behind)} behind" if event.behind else ""
    stalled, limit = format.duration(event.stalled_s), format.duration(event.limit_s)
    return (
        f"hang in phase {event.phase} at step {event.step}:"
        f" no progress for {stalled} (limit {limit}){behind}"
    )
