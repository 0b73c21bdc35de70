"""The scheduler takes hosts back: how long ranks have for a checkpoint, and whether it did."""

from orchestrator.diagnosis.cause.findings import Findings
from orchestrator.diagnosis.cause.verdict import Verdict
from orchestrator.job.state import Run

STOP_SLACK_S = 15.0
"""Seconds after SIGKILL is due for every agent to report that no process is left."""
ASK_S = 30.0
"""Seconds before an allocation ends that are kept to requeue the job with a busy scheduler."""


def room_s(notice_s: float) -> float:
    """Seconds of a scheduler's notice that ranks have, so that time is left to kill ranks that hang
    and to requeue the job. Ranks have at least a third of the notice."""
    return max(notice_s - STOP_SLACK_S - ASK_S, notice_s / 3)


def grace_to_leave_s(run: Run, at: float) -> float:
    """Seconds for a checkpoint: all of the notice if that is longer than `stop_grace`, because
    unsaved work is lost; and no longer than the allocation lasts."""
    assert run.job is not None
    granted = run.scheduler.allocation
    if granted is None or granted.notice_s is None:
        return run.job.stop_grace
    room = room_s(granted.notice_s)
    longest = max(run.job.stop_grace, room)
    if granted.ends_at is None:
        return longest
    # An administrator may have moved the end, but the notice always comes before it.
    return max(room, min(longest, granted.ends_at - at - STOP_SLACK_S - ASK_S))


def taken_by_scheduler(findings: Findings, verdict: Verdict) -> str:
    """The reason if the first cause is that the scheduler took a host, which has no culprit; else
    empty."""
    for lost in findings.lost:
        if verdict.kind == "host-lost" and lost.host == verdict.culprit.host and lost.taken:
            return f"the scheduler took {lost.host} ({lost.taken})"
    return ""
