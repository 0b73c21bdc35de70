"""Hosts are given back: how long ranks have for a checkpoint then, and whose wish it was. Pure."""

from orchestrator.diagnosis.cause.findings import Findings
from orchestrator.diagnosis.cause.verdict import Verdict
from orchestrator.job.state import Run

STOP_SLACK_S = 15.0
"""After SIGKILL is due, for every agent to say that no process is left."""
ASK_S = 30.0
"""Before an allocation ends: to ask a scheduler, also a busy one, to queue the job again."""


def room_s(notice_s: float) -> float:
    """What is left of a scheduler's notice when ranks that hang have to be given up, and the job
    to be asked back, before it ends. Of a short notice they have a third all the same."""
    return max(notice_s - STOP_SLACK_S - ASK_S, notice_s / 3)


def grace_to_leave_s(run: Run, at: float) -> float:
    """All of the notice where that is longer than `stop_grace`, for what is not saved by then is
    lost; and no longer than the allocation lasts, for at its end the job is."""
    assert run.job is not None
    granted = run.scheduler.allocation
    if granted is None or granted.notice_s is None:
        return run.job.stop_grace
    room = room_s(granted.notice_s)
    longest = max(run.job.stop_grace, room)
    if granted.ends_at is None:
        return longest
    # A person may have moved the end: the notice comes before the true one.
    return max(room, min(longest, granted.ends_at - at - STOP_SLACK_S - ASK_S))


def taken_by_scheduler(findings: Findings, verdict: Verdict) -> str:
    """In words, where the first cause is that the scheduler took a host: that is nobody's fault."""
    for lost in findings.lost:
        if verdict.kind == "host-lost" and lost.host == verdict.culprit.host and lost.taken:
            return f"the scheduler took {lost.host} ({lost.taken})"
    return ""
