"""Decides what an agent of an allocation does when its leader is gone. Pure.

The job keeps its hosts for the whole run, so another agent can become the leader. If the former
leader's host works, the new leader starts an agent there again. If it does not, a spare replaces
it. The job is requeued only if too few hosts are left.
"""

from collections.abc import Sequence

from msgspec import Struct

from orchestrator.contract.files.leader_file import Term
from orchestrator.failover.journal_watch import runs_without_leader
from orchestrator.job.hosts.preemption import ASK_S
from orchestrator.job.stage import Queued
from orchestrator.job.state import Run, usable
from orchestrator.seams import CurrentRun

UNLED = 3
"""After so many runs in a row without a leader, another run would not help."""
VERDICT_S = 330.0
"""How long to try to clear a host before it counts as lost. Longer than Slurm's default of
SlurmdTimeout, 300 s, after which Slurm gives up a node."""
NOTICE_SLACK_S = 75.0
"""A scheduler may warn of the time limit this much earlier than configured. A new leader has not
received that warning."""


class Leave(Struct, frozen=True):
    """Exit: the job is over, or other processes continue it."""

    why: str


class QueueAgain(Struct, frozen=True):
    without: tuple[str, ...]
    why: str


class ClearHost(Struct, frozen=True):
    """End all processes on the former leader's host, which the scheduler still counts as part of
    the run. If that works, the host works too."""

    host: str


class TakeOver(Struct, frozen=True):
    how: str
    """How the former leader ended, as far as known."""
    host_works: bool = False
    """Its host has shown that it works: only the leader's process had ended there."""


class AskAgain(Struct, frozen=True):
    why: str


def remedy(
    run: Run, term: Term, host: str, own: CurrentRun, now: float
) -> Leave | QueueAgain | ClearHost | TakeOver:
    """What the agent of `host` does, given the journal and the scheduler's answer about this run.

    Args:
        own: the scheduler's answer.
        now: Unix time.
    """
    if own.phase == "broken":
        # A node failed and the scheduler ends the run. It would not requeue the job by itself.
        out = run.scheduler.left_out if was_given_back(run, term) else ()
        return QueueAgain(out, f"its leader is gone, and the scheduler is ending it: {own.words}")
    if own.phase != "running":
        # The process that requeued the job also set the hosts to exclude.
        return Leave(_why_over(own))
    # The journal names the leader of an earlier allocation, whose host says nothing about this one.
    if runs_without_leader(run, term) > 0:
        return QueueAgain(_first(own.hosts, but=host), "no leader has started in this allocation")
    if was_given_back(run, term):
        # The leader decided to requeue the job and died before the scheduler accepted it.
        return QueueAgain(run.scheduler.left_out, "its leader had decided so, and is gone")
    gone = own.given_up.get(run.scheduler.leader)
    if _ends_soon(run, own, now):
        # A new leader has missed the warning of the time limit, and would train until SIGKILL.
        out = (run.scheduler.leader,) if gone else ()
        return QueueAgain(out, "its leader is gone, and the scheduler is about to take the hosts")
    if gone and not _goes_on_without_leaders_host(run, own):
        return QueueAgain(
            (run.scheduler.leader,), f"its leader is gone with {run.scheduler.leader}: {gone}"
        )
    # The scheduler has given up the leader's host, so there is nothing to clear, and enough other
    # hosts are left.
    if gone:
        return TakeOver(f"its host is lost: {gone}")
    # Clearing this host would end this agent too.
    if run.scheduler.leader == host:
        return TakeOver("its process on this same host had ended", host_works=True)
    return ClearHost(run.scheduler.leader)


def after_failed_clearing(
    run: Run, own: CurrentRun, why: str, tried_s: float
) -> TakeOver | QueueAgain | AskAgain:
    """What to do when the leader's host could not be cleared.

    The host may be unreachable for a moment only, so wait for it if the job has no spare.

    Args:
        why: the error of the last try.
        tried_s: seconds since the first try.
    """
    if has_spare(run, own):
        return TakeOver(f"its host is unreachable: {why}")
    if tried_s >= VERDICT_S:
        return QueueAgain(
            (run.scheduler.leader,), f"its leader is gone, and its host is unreachable: {why}"
        )
    return AskAgain(why)


def no_more_of_it(own: CurrentRun, host: str) -> str:
    """Why the leader on `host`, which hears no other agent, must exit; empty if it may continue.
    It must change nothing then, because other processes have the job or will get it."""
    if own.phase in ("queued again", "over"):
        return f"this run of the job is over: {own.words}"
    gone = own.given_up.get(host)
    return f"{host}, the leader's own host, is not part of the run any more: {gone}" if gone else ""


def was_given_back(run: Run, term: Term) -> bool:
    """Whether the leader of this run has decided to requeue the job. All agents follow this
    decision, also about the hosts to exclude."""
    return isinstance(run.stage, Queued) and runs_without_leader(run, term) == 0


def over_for(run: Run, term: Term) -> str:
    """Why the journal says that an agent of `term` must not act for the job; empty if it may."""
    if run.job is None or run.ending is not None:
        return "the job is over"
    if run.job.launch.launch != term.launch:
        return "the job was submitted again"
    return "another run of the job has a leader" if runs_without_leader(run, term) < 0 else ""


def has_spare(run: Run, own: CurrentRun) -> bool:
    """Whether enough hosts for the plan are left without the leader's host."""
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
    """Whether the scheduler is about to end the allocation."""
    leaving = run.interruption.leaving
    # The scheduler had warned the former leader that it takes the hosts.
    if leaving is not None and leaving.requeue and not leaving.by_choice:
        return True
    notice_s = (run.scheduler.allocation.notice_s if run.scheduler.allocation else None) or 0.0
    return own.ends_at is not None and own.ends_at - now <= notice_s + NOTICE_SLACK_S + ASK_S


def _first(hosts: Sequence[str], but: str) -> tuple[str, ...]:
    """The host whose agent should have led but never started."""
    return tuple(name for name in hosts[:1] if name != but)


def _why_over(own: CurrentRun) -> str:
    said = {
        "queued again": "the job is queued again already",
        "ending": "the scheduler is ending the job",
    }
    return f"{said.get(own.phase, 'the scheduler has ended the job')}: {own.words}"
