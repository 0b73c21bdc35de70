"""A job that shrank grows again when its hosts are back.

It does so right after a checkpoint, so that little work is lost; with a plan that it had before, so
that no new plan is needed; and only once in a while, so that a host that comes and goes does not
stop it all the time. Nothing failed, so this costs no restart.
"""

from msgspec.structs import replace

from orchestrator.contract.messages.actions import ReplaceAgent
from orchestrator.job.interruption import Leaving
from orchestrator.job.plans import JobPlan
from orchestrator.job.stage import Running
from orchestrator.job.state import Run, has_successors, hosts_given, switches_of, usable
from orchestrator.plan.placement.place import room_for

EVERY_S = 1800.0
"""Seconds from one growth to the next, at least."""
ASK_EVERY_S = 600.0
"""Seconds between two requests for agents on missing hosts."""


def wish(run: Run, at: float) -> Leaving | None:
    """Why to stop at this checkpoint and continue with more hosts; None if there is no reason."""
    if (
        not isinstance(run.stage, Running)
        or run.interruption.leaving is not None
        or run.interruption.cancelled_by is not None
    ):
        return None
    if run.plans.grown_at is not None and at < run.plans.grown_at + EVERY_S:
        return None
    found = _within_reach(run)
    if found is None:
        return None
    came = [name for name in usable(run) if name not in run.attempt.placement]
    words = (
        f"growing from {len(run.plan.hosts)} to {len(found.plan.hosts)} hosts by plan"
        f" {found.number}: {', '.join(came)} can be used again"
    )
    return Leaving(cause="growing", words=words, requeue=False)


def grown(run: Run) -> Run:
    """The state with the largest plan for which there are hosts; unchanged if there is none."""
    found = _within_reach(run)
    if found is None:
        return run
    larger = run.plans.larger[: run.plans.larger.index(found)]
    return replace(
        run, plans=replace(run.plans, replanned=found if larger else None, larger=larger)
    )


def shrunk(run: Run, at: float, smaller: JobPlan) -> Run:
    """The state with a plan for fewer hosts. It keeps the plan to grow back to."""
    more = [plan for plan in run.plans.larger if len(plan.plan.hosts) > len(run.plan.hosts)]
    return replace(
        run, plans=replace(run.plans, replanned=smaller, larger=(*more, run.current), asked_at=at)
    )


def ask(run: Run, at: float) -> tuple[Run, tuple[ReplaceAgent, ...]]:
    """Ask for agents on missing hosts now and then. Those that start will register."""
    waiting = isinstance(run.stage, Running) and bool(run.plans.larger) and not has_successors(run)
    if not waiting or run.interruption.leaving is not None or at < run.plans.asked_at + ASK_EVERY_S:
        return run, ()
    missing = [
        name
        for name in hosts_given(run)
        if name not in run.hosts.exclude
        and not (name in run.hosts.by_name and run.hosts.by_name[name].alive)
    ]
    if not missing:
        return run, ()
    reason = f"the job runs on {len(run.plan.hosts)} of {len(run.full.plan.hosts)} hosts: is"
    orders = tuple(
        ReplaceAgent(host=name, reason=f"{reason} {name} there again?") for name in missing
    )
    return replace(run, plans=replace(run.plans, asked_at=at)), orders


def _within_reach(run: Run) -> JobPlan | None:
    """The largest plan of `larger` for which there are enough hosts."""
    if not run.plans.larger:  # as nearly always: do not look at thousands of hosts
        return None
    there, switches = usable(run), switches_of(run)
    for larger in run.plans.larger:
        if room_for(larger.plan, there, switches) >= len(larger.plan.hosts):
            return larger
    return None
