"""The end of an attempt: from the exit of a rank to the verdict, and to what follows from it.

The walk of a dead rank: `rank_exited` keeps the exit and stops the other ranks, `host_stopped` is
called for each host, and with the last one `conclude` and `recover` decide what is next.
"""

from msgspec.structs import replace

from orchestrator.contract.files import exit_codes
from orchestrator.contract.messages.actions import (
    GatherEvidence,
    JudgeHang,
    ReplaceAgent,
    StopAttempt,
)
from orchestrator.contract.messages.events import AgentLost, HostStopped, RankExited
from orchestrator.diagnosis.cause.diagnose import Weight, weigh
from orchestrator.diagnosis.cause.exits import (
    breaks_its_host,
    failure_of,
    has_mismatch,
    timed_out,
)
from orchestrator.diagnosis.cause.findings import Findings
from orchestrator.diagnosis.cause.verdict import Verdict
from orchestrator.diagnosis.hang.report import ranks_words
from orchestrator.job.failures import oom_replan, rollback
from orchestrator.job.failures.incident_records import (
    decided,
    first_cause,
    incident_of,
    with_incident_before_cancel,
)
from orchestrator.job.failures.policy import Decision, decide
from orchestrator.job.host_state import lost_host
from orchestrator.job.hosts.exclusion import replaced
from orchestrator.job.hosts.preemption import STOP_SLACK_S, taken_by_scheduler
from orchestrator.job.interruption import Leaving
from orchestrator.job.leave import Result, end, requeue
from orchestrator.job.stage import Diagnosing, Holding, Running, Starting, Stopping
from orchestrator.job.start import start_if_ready, wait
from orchestrator.job.state import (
    Run,
    has_successors,
    is_placed,
    with_deadline,
    with_ended,
    with_findings,
    with_host,
    with_incident,
    with_leaving,
)

FAILED_GRACE_S = 3.0
"""Seconds from SIGTERM to SIGKILL when a peer is dead: no checkpoint is possible any more."""
EVIDENCE_S = 5.0
"""Limit for agents to gather evidence; the supervisor waits twice as long."""
JUDGE_S = 30.0
"""Limit for the leader's analysis of a hang, from the time at which the ranks are stopped."""
ASK_S = 10.0
"""Limit for the evidence of a mismatch: small files that the ranks wrote before they exited."""
MOST_KILLED = 64
"""Killed ranks that are kept, to be named."""
MOST_EXITS = 64
"""Exits that are kept for the diagnosis; at 16,384 ranks the others are symptoms of these."""


# A rank exits


def rank_exited(run: Run, event: RankExited) -> Result:
    leaving, cancelled = run.interruption.leaving, run.interruption.cancelled_by is not None
    if leaving is not None:
        # The scheduler takes the hosts, or the job gives them back: ranks are meant to exit.
        if not _fails_on_its_way_out(run, event):
            return run, ()
        # This exit is a failure even though its agent was stopping the rank. From now on the ranks
        # stop because of it.
        run, event = with_leaving(run, None), replace(event, stopped=False)
    found = run.interruption.findings
    if found is not None and cancelled and _did_not_hang(found, event):
        return with_findings(run, None), ()
    seen_at = event.at + event.detected_after_s
    found = found or Findings(opened_at=seen_at)
    if any(exited.rank == event.rank for exited in found.exits):
        return run, ()  # the agent repeats its reports after a reconnection
    by_watchdog = not cancelled and _ended_by_watchdog(run, event)
    # After a cancellation ranks exit as they were told to. Any other exit is a failure, and a
    # cancelled job must still show it.
    if not (cancelled and (event.stopped or _was_told_to_leave(event))):
        kept = _keep(found.exits, event)
        if kept is not found.exits:  # at 16,384 ranks nearly all of those that stop change nothing
            run = with_findings(run, replace(found, exits=kept))
    # The order to stop was given before, or the evidence of a hang is still being collected.
    if isinstance(run.stage, Stopping) or _still_diagnosing(run, event):
        return run, ()
    # Do not stop the peers yet: while they wait, their stacks and dumps show for which rank.
    if by_watchdog:
        assert run.interruption.findings is not None
        reason = f"a collective of rank {event.rank} on {event.host} did not return in time"
        return gather_evidence(run, seen_at, reason, run.interruption.findings)
    return stop_failed(run, seen_at, f"rank {event.rank} on {event.host} exited")


def _fails_on_its_way_out(run: Run, event: RankExited) -> bool:
    """A rank that was to save a checkpoint and exit has failed instead.

    All ranks agree to leave, so some exit before their own agent hears of the stop. An error of a
    rank that was told to stop can come from the stop itself, unless only broken hardware causes it.
    """
    if run.interruption.leaving is None or not run.interruption.leaving.by_choice:
        return False
    if event.stopped:
        return breaks_its_host(event)
    return not _was_told_to_leave(event) and weigh(event) is Weight.CAUSE


def _was_told_to_leave(event: RankExited) -> bool:
    """The rank says so itself, even if its agent knew of no stop yet."""
    found = failure_of(event)
    return found is not None and found.scope == "scheduler"


def _did_not_hang(found: Findings, event: RankExited) -> bool:
    """A job was cancelled while its ranks were taken for stuck, and they saved their checkpoint: so
    they were not stuck."""
    others = found.exits or found.lost or found.stopped
    return found.hang is not None and event.exit_code == exit_codes.CHECKPOINTED and not others


def _ended_by_watchdog(run: Run, event: RankExited) -> bool:
    """The rank exited because a collective took too long. So it is a hang that the rank noticed
    itself, and its peers still have the evidence of which rank they wait for."""
    if event.stopped or not timed_out(event) or not isinstance(run.stage, Starting | Running):
        return False
    found = run.interruption.findings
    return found is None or (all(_follows(exited) for exited in found.exits) and not found.lost)


def _still_diagnosing(run: Run, event: RankExited) -> bool:
    """A watchdog aborts peers one after the other. That does not end the diagnosis."""
    found = run.interruption.findings
    by_watchdog = isinstance(run.stage, Diagnosing) and found is not None and found.hang is None
    return by_watchdog and _follows(event)


def _follows(exited: RankExited) -> bool:
    """A hang can cause this exit. A watchdog's message counts even if the user has given it a
    failure class that is not a symptom."""
    return weigh(exited) is Weight.SYMPTOM or timed_out(exited)


def _keep(exits: tuple[RankExited, ...], new: RankExited) -> tuple[RankExited, ...]:
    """The first exits. One that may be the cause is kept, however many symptoms came before it."""
    if len(exits) < MOST_EXITS:
        return (*exits, new)
    spare = next((exited for exited in reversed(exits) if _is_consequence(exited)), None)
    if spare is None or _is_consequence(new):
        return exits
    return (*(exited for exited in exits if exited is not spare), new)


def _is_consequence(exited: RankExited) -> bool:
    return exited.stopped or weigh(exited) not in (Weight.CAUSE, Weight.ENDED_FIRST)


def gather_evidence(run: Run, at: float, reason: str, findings: Findings) -> Result:
    """Ranks hang: ask all agents for evidence while the ranks still run."""
    trained, deadline = isinstance(run.stage, Running), at + 2 * EVIDENCE_S
    stage = Diagnosing(since=at, reason=reason, deadline=deadline, trained=trained)
    after = with_findings(replace(run, stage=stage), findings)
    return after, (GatherEvidence(attempt=run.attempt.number, timeout_s=EVIDENCE_S, reason=reason),)


# A host has no process of the attempt left


def host_stopped(run: Run, event: HostStopped) -> Result:
    """The host has no rank left: of the present attempt, or of an earlier one."""
    run = counts_again(run, event)
    # An agent that came back reports on ranks of an earlier attempt, or of a host that this attempt
    # does not use. The host can be used again, and the attempt is not affected.
    if event.attempt != run.attempt.number or not is_placed(run, event.host):
        return run, ()
    interruption = run.interruption
    # A rank that was told to stop does not finish, and that is no failure.
    expected = interruption.cancelled_by is not None or interruption.leaving is not None
    failed = not event.finished and not expected
    found = interruption.findings or Findings(opened_at=event.at)
    if failed and _tells_more(found.stopped, event):
        found = replace(found, stopped=(*found.stopped, event))
        interruption = replace(interruption, findings=found)
    done = with_ended(run.attempt.done, event.host, finished=event.finished)
    # In other cases they have the grace of a failure, in which nothing can be saved any more.
    killed = run.attempt.killed if expected else ()
    if expected and event.killed:  # a set, because an agent repeats its reports
        killed = tuple(sorted({*killed, *event.killed})[:MOST_KILLED])
    attempt = replace(run.attempt, done=done, killed=killed)
    run = replace(run, attempt=attempt, interruption=interruption)
    # A host that finished alone ends nothing: its peers are still writing the last checkpoint.
    if isinstance(run.stage, Stopping) or failed or all_done(run):
        return stop_or_conclude(run, event.at, f"torchrun ended on {event.host}")
    return run, ()


def _tells_more(known: tuple[HostStopped, ...], new: HostStopped) -> bool:
    """The diagnosis uses the first host that stopped, the first that says why, and all that were
    cut off. Thousands of others stop because of these."""
    return bool(not known or new.alone_s or (new.why and not any(stop.why for stop in known)))


def counts_again(run: Run, event: HostStopped) -> Run:
    """An agent that came back with old ranks counts as alive once these are gone."""
    known = run.hosts.by_name.get(event.host)
    if known is None or not known.back or event.attempt != known.runs:
        return run
    return with_host(run, replace(known, alive=True, back=False))


def give_up_stuck_hosts(run: Run, at: float) -> Result:
    """The ranks of some hosts did not end in time: give these hosts up and replace their agents."""
    stuck = [host for host in run.attempt.placement if host not in run.attempt.done]
    why = f"its ranks did not end within {at - run.stage.since:.0f} s"
    found = run.interruption.findings or Findings(opened_at=at)
    lost = tuple(AgentLost(at=at, host=host, why=why, silent_s=0.0) for host in stuck)
    hosts = {
        name: lost_host(host, at, closed=False) if name in stuck else host
        for name, host in run.hosts.by_name.items()
    }
    run = replace(
        run,
        hosts=replace(run.hosts, by_name=hosts),
        attempt=replace(run.attempt, done={**run.attempt.done, **dict.fromkeys(stuck, False)}),
    )
    leaving = run.interruption.leaving
    # Nobody outside took these hosts, so ranks that cannot be ended are a failure with a culprit.
    # Otherwise the scheduler is about to take the hosts, and that ends the ranks as well.
    if leaving is None or leaving.by_choice:
        found = replace(found, stuck=lost)
        interruption = replace(run.interruption, leaving=None, findings=found)
        return conclude(replace(run, interruption=interruption), at)
    again = asked_again(run, stuck, why)
    # The scheduler had long enough to say why it wants the hosts back.
    run, actions = conclude(
        with_leaving(run, replace(leaving, cause=leaving.cause or "unknown")), at
    )
    return run, (*again, *actions)


def asked_again(run: Run, hosts: list[str], reason: str) -> tuple[ReplaceAgent, ...]:
    """Asks for the next agents of hosts whose agents went while ranks leave, if the job stays in
    its allocation and can use these hosts."""
    if run.interruption.leaving is None or run.interruption.leaving.requeue:
        return ()
    known, exclude = run.hosts.by_name, run.hosts.exclude
    # A host that failed a check would fail it again.
    fit = [name for name in hosts if not known[name].unfit and name not in exclude]
    return tuple(ReplaceAgent(host=name, reason=reason) for name in fit)


# Stop


def stop_failed(run: Run, at: float, reason: str) -> Result:
    """Stop an attempt that has failed. No checkpoint can be written any more."""
    keep = run.job is not None and run.job.keep_ranks
    return stop(run, at, reason, FAILED_GRACE_S, keep_ranks=keep)


def stop(run: Run, at: float, reason: str, grace_s: float, *, keep_ranks: bool = False) -> Result:
    deadline = at + grace_s + STOP_SLACK_S
    after = replace(run, stage=Stopping(since=at, reason=reason, deadline=deadline))
    order = StopAttempt(
        attempt=run.attempt.number,
        grace_s=grace_s,
        reason=reason,
        keep_ranks=keep_ranks,
        in_memory=_starts_from_memory(run),
    )
    if not isinstance(run.stage, Diagnosing) or run.interruption.findings is None:
        return after, (order,)
    # The evidence of a hang is complete, or as complete as it gets: have it analysed meanwhile.
    findings = replace(run.interruption.findings, judge_by=at + JUDGE_S)
    judge = JudgeHang(attempt=run.attempt.number, reason=reason)
    return with_findings(after, findings), (order, judge)


def _starts_from_memory(run: Run) -> bool:
    """Whether the attempt after an orderly stop finds the memory of all hosts, and partners have
    what a host that leaves had. A script of the user keeps what it wants to keep itself."""
    job, leaving = run.job, run.interruption.leaving
    if job is None or leaving is None or leaving.requeue or job.run is not None:
        return False
    # Hosts that are added or taken away by the scheduler may change the mesh, or hurry.
    changes_hosts_only = leaving.warned or leaving.straggler is not None or leaving.by_drain
    return changes_hosts_only and bool(run.copies_in_memory)


def stop_or_conclude(run: Run, at: float, reason: str) -> Result:
    if all_done(run):
        return conclude(run, at)
    if isinstance(run.stage, Stopping):
        return run, ()
    return stop_failed(run, at, reason)


def all_done(run: Run) -> bool:
    # Thousands of hosts ask this one after the other, so compare the lengths first.
    return len(run.attempt.done) >= len(run.attempt.placement) and set(
        run.attempt.placement
    ) <= set(run.attempt.done)


# Conclude and recover


def _may_have_obeyed(run: Run) -> bool:
    """Whether exit code 0 may mean that the ranks did as they were told, and left early.

    The bundled trainer and `ndctl.should_stop` have another exit code for that. A program of the
    user may have a handler of SIGTERM that ends it with 0, such as Lightning's.
    """
    told = run.interruption.cancelled_by is not None or run.interruption.leaving is not None
    return told and run.job is not None and run.job.run is not None


def conclude(run: Run, at: float) -> Result:
    """No process of the attempt is left on any host: decide what follows."""
    # Even if a hang was suspected: the last step was only slow.
    if all(run.attempt.done.values()) and not _may_have_obeyed(run):
        return end(run, at, "SUCCEEDED", f"all ranks finished in attempt {run.attempt.number}")
    interruption = run.interruption
    if interruption.cancelled_by is not None:
        by = _with_killed(run, f"cancelled by {interruption.cancelled_by}")
        return end(with_incident_before_cancel(run), at, "CANCELLED", by)
    if interruption.leaving is not None and interruption.leaving.cause is None:
        return run, ()  # wait for the scheduler's reason: a cancelled job must not be requeued
    found = interruption.findings
    if found is None:
        assert interruption.leaving is not None
        return _leave(run, interruption.leaving, at)
    asked = found.judged or found.judge_by is not None or found.asked_after
    # The exits alone do not show which rank called the wrong collective, and asking takes seconds.
    # It is done once: an answer that is missing must not delay the restart again.
    if not asked and has_mismatch(found):
        return _ask_for_mismatch(run, found, at)
    if found.judged is None and found.judge_by is not None and at < found.judge_by:
        return with_deadline(run, found.judge_by), ()  # the analysis is still running
    return recover(run, found, at)


def _ask_for_mismatch(run: Run, findings: Findings, at: float) -> Result:
    """Ranks exited over collectives that did not match: ask what each rank had called."""
    until = at + ASK_S
    ask = GatherEvidence(
        attempt=run.attempt.number,
        timeout_s=ASK_S,
        reason="collectives of ranks did not match: ask what each rank had called",
        ended=True,
    )
    findings = replace(findings, asked_after=True, judge_by=until)
    return with_deadline(with_findings(run, findings), until), (ask,)


def _leave(run: Run, leaving: Leaving, at: float) -> Result:
    """The ranks have exited, as a rule after they saved a checkpoint."""
    words = _with_killed(run, leaving.words)
    if leaving.requeue:
        return requeue(run, at, words, whole=not has_successors(run))
    return start_if_ready(with_leaving(wait(run, at, words), None), at)


def _with_killed(run: Run, words: str) -> str:
    """Adds the ranks that did not heed SIGTERM, because they saved no checkpoint."""
    killed = run.attempt.killed
    if not killed:
        return words
    assert run.job is not None
    grace = f"{run.job.stop_grace:g} s of SIGTERM (resilience.stop_grace)"
    return f"{words}; {ranks_words(killed)} did not end within {grace} and had to be killed"


def recover(run: Run, findings: Findings, at: float, verdict: Verdict | None = None) -> Result:
    """Record the incident, then restart or give up.

    Args:
        verdict: what `findings` amount to, if the caller has found that out.
    """
    verdict = verdict or first_cause(run, findings)
    if verdict.failure is not None and verdict.failure.name == oom_replan.DEVICE:
        verdict = oom_replan.with_holders(run, verdict, verdict.failure)
    if findings.lost and (taken := taken_by_scheduler(findings, verdict)):
        # The scheduler took the host: nobody is at fault, so there is no incident.
        leaving = Leaving(cause="drained", words=taken, requeue=False)
        return _leave(with_findings(run, None), run.interruption.leaving or leaving, at)
    decision = decide(run, verdict)
    if decision.action == "replan" and not oom_replan.is_of_the_plan(run, verdict):
        decision = replace(decision, action="stop", reason=oom_replan.no_help(verdict))
    # It can turn into a stop: there may be no checkpoint that is old enough.
    if decision.action == "rollback":
        run, decision = rollback.perform(run, findings.exits, decision)
    incident = decided(run, incident_of(run, findings, verdict, decision.reason), decision)
    # The rule replaces the culprit's host, so the next attempt must not start on it.
    if decision.without is not None:
        why = f"{verdict.cause} (rule {decision.rule})"
        run = replaced(run, decision.without, why, at)
    run = with_findings(with_incident(run, incident), None)
    if decision.action == "stop":
        return _give_up(run, at, verdict, decision)
    spent = replace(
        run.history,
        restarts=run.history.restarts + 1,
        fruitless=run.history.fruitless + decision.counts,
    )
    run = replace(wait(run, at, decision.words), history=spent)
    return _restart(run, findings, at, verdict, decision)


def _restart(
    run: Run, findings: Findings, at: float, verdict: Verdict, decision: Decision
) -> Result:
    leaving = run.interruption.leaving
    if decision.action == "replan":
        short = oom_replan.shortage_of(run, verdict, decision.words, adopt=True)
        run, orders = oom_replan.look(run, at, short)
        # A requeue gives the hosts back, so the answer of the planner comes with the next leader.
        if leaving is None or not leaving.requeue:
            return with_leaving(run, None), orders
    if leaving is not None:
        return _leave(run, leaving, at)
    if decision.action == "requeue":
        return requeue(run, at, decision.words, whole=not has_successors(run))
    # Agents of these hosts were asked for when they were lost.
    ordered = {lost.host for lost in (*findings.lost, *findings.left)}
    missing = tuple(
        ReplaceAgent(host=host.name, reason=decision.words)
        for host in run.hosts.by_name.values()
        if not (host.alive or host.unfit or host.name in ordered or host.name in run.hosts.exclude)
    )
    run, actions = _hold(run, at, decision) if decision.wait_s else start_if_ready(run, at)
    return run, (*missing, *actions)


def _give_up(run: Run, at: float, verdict: Verdict, decision: Decision) -> Result:
    """End the job. If memory was short, ask the planner first what would help."""
    if run.interruption.leaving is not None or not oom_replan.is_of_the_plan(run, verdict):
        return end(run, at, "FAILED", decision.words)
    short = oom_replan.shortage_of(run, verdict, decision.words, adopt=False)
    return oom_replan.look(wait(run, at, decision.words), at, short)


def _hold(run: Run, at: float, decision: Decision) -> Result:
    """Wait before the restart, because the failure may be transient; agents may come meanwhile."""
    reason = (
        f"waits {decision.wait_s:.0f} s before attempt {run.attempt.number + 1},"
        f" rule {decision.rule}: {decision.reason}"
    )
    until = at + decision.wait_s
    return replace(run, stage=Holding(since=at, reason=reason, deadline=until)), ()
