"""What an agent of an allocation does whose leader is gone, by what it knows. Pure.

The hosts stay as they are for as long as the run lasts, so another agent of the run can lead it:
where the former leader's host is well an agent is started there again, and where it is not a spare
takes its place. Only where too few hosts are left does the job go back to the queue.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.contract.files.leader_file import Term
from orchestrator.failover.journal_watch import runs_without_leader
from orchestrator.job.hosts.preemption import ASK_S
from orchestrator.job.stage import Queued
from orchestrator.job.state import Run, usable
from orchestrator.seams import CurrentRun

UNLED = 3
"""Runs in a row in which no leader began: another one would not help."""
VERDICT_S = 330.0
"""For a host on which nothing can be started, and that the scheduler has not given up either:
Slurm's own default of SlurmdTimeout is 300."""
NOTICE_SLACK_S = 75.0
"""A scheduler may warn of the time limit so much earlier than it says; who leads from then on has
not heard it."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The job is not this agent's to go on with."""

    why: str


@dataclass(frozen=True, slots=True)
class QueueAgain:
    without: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class ClearHost:
    """End what is left on the former leader's host, which the scheduler says is of the run. Whether
    that can be done says whether the host is well."""

    host: str


@dataclass(frozen=True, slots=True)
class TakeOver:
    how: str
    """The former leader ended, as far as is known."""


@dataclass(frozen=True, slots=True)
class AskAgain:
    why: str


def remedy(
    run: Run, term: Term, host: str, own: CurrentRun, now: float
) -> Leave | QueueAgain | ClearHost | TakeOver:
    """What the agent of `host` does, by the journal and by what the scheduler says of its run."""
    if own.phase == "broken":
        out = run.scheduler.left_out if was_given_back(run, term) else ()
        return QueueAgain(out, f"its leader is gone, and the scheduler is ending it: {own.words}")
    if own.phase != "running":
        # Whoever has queued it again has said which hosts the next run does without.
        return Leave(_why_over(own))
    if runs_without_leader(run, term) > 0:
        return QueueAgain(_first(own.hosts, but=host), "no leader has begun in this allocation")
    if was_given_back(run, term):
        return QueueAgain(run.scheduler.left_out, "its leader had decided so, and is gone")
    gone = own.given_up.get(run.scheduler.leader)
    if _ends_soon(run, own, now):
        out = (run.scheduler.leader,) if gone else ()
        return QueueAgain(out, "its leader is gone, and the scheduler is about to take the hosts")
    if gone and not _goes_on_without_leaders_host(run, own):
        return QueueAgain(
            (run.scheduler.leader,), f"its leader is gone with {run.scheduler.leader}: {gone}"
        )
    if gone:
        return TakeOver(f"its host is lost: {gone}")
    if run.scheduler.leader == host:
        return TakeOver("its process on this very host had ended")
    return ClearHost(run.scheduler.leader)


def after_failed_clearing(
    run: Run, own: CurrentRun, why: str, tried_s: float
) -> TakeOver | QueueAgain | AskAgain:
    """`why`: nothing could be done on the leader's host, for `tried_s` by now. It may be cut off
    for a moment, and its leader be back soon; with a spare nobody need wait for that."""
    if has_spare(run, own):
        return TakeOver(f"its host does not answer: {why}")
    if tried_s >= VERDICT_S:
        return QueueAgain(
            (run.scheduler.leader,), f"its leader is gone, and so seems its host: {why}"
        )
    return AskAgain(why)


def no_more_of_it(own: CurrentRun, host: str) -> str:
    """Why the leader on `host`, which hears no other agent, is not to go on; empty: it is. It
    touches nothing: others have the job by now, or will."""
    if own.phase in ("queued again", "over"):
        return f"this run of the job is over: {own.words}"
    gone = own.given_up.get(host)
    return f"{host}, the leader's own host, is none of the run any more: {gone}" if gone else ""


def was_given_back(run: Run, term: Term) -> bool:
    """Whether the leader of this run has decided to queue the job again. That settles it for all
    agents: also which hosts the next run does without."""
    return isinstance(run.stage, Queued) and runs_without_leader(run, term) == 0


def over_for(run: Run, term: Term) -> str:
    """Why the job is no business of an agent of `term` any more, as the journal says; empty: it
    is."""
    if run.job is None or run.ending is not None:
        return "the job is over"
    if run.job.launch.launch != term.launch:
        return "the job was submitted again"
    return "another run of the job has a leader" if runs_without_leader(run, term) < 0 else ""


def has_spare(run: Run, own: CurrentRun) -> bool:
    """Whether enough hosts are left without the leader's, as the journal has them."""
    return len(_others(run, own)) >= len(run.plan.hosts)


def _goes_on_without_leaders_host(run: Run, own: CurrentRun) -> bool:
    job = run.job
    assert job is not None
    shrinks = job.shrink and len(_others(run, own)) >= job.min_hosts
    return has_spare(run, own) or shrinks


def _others(run: Run, own: CurrentRun) -> list[str]:
    return [
        name for name in usable(run) if name != run.scheduler.leader and name not in own.given_up
    ]


def _ends_soon(run: Run, own: CurrentRun, now: float) -> bool:
    """The allocation: then who takes over has heard nothing of it, and would train to its end."""
    leaving = run.interruption.leaving
    if leaving is not None and leaving.requeue and not leaving.by_choice:
        return True
    notice_s = (run.scheduler.allocation.notice_s if run.scheduler.allocation else None) or 0.0
    return own.ends_at is not None and own.ends_at - now <= notice_s + NOTICE_SLACK_S + ASK_S


def _first(hosts: Sequence[str], but: str) -> tuple[str, ...]:
    """The host whose agent should have led, and never began."""
    return tuple(name for name in hosts[:1] if name != but)


def _why_over(own: CurrentRun) -> str:
    said = {
        "queued again": "the job is queued again already",
        "ending": "the scheduler is ending the job",
    }
    return f"{said.get(own.phase, 'the scheduler has ended the job')}: {own.words}"
