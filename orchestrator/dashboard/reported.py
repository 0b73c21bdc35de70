"""What the leader of a job last told its cluster, where the journal that is here is older.

A copy of a journal ends where its pods were last heard. A pod that cannot be asked any more may
have told its cluster more since, in `report.json` of the copy; steps and checkpoints of it count.
"""

from dataclasses import replace

from orchestrator.dashboard.metrics import Metric, Progress
from orchestrator.dashboard.view import CheckpointView, Seen
from orchestrator.job.reports.job_report import JobReport, is_news


def with_report(seen: Seen, progress: Progress, report: JobReport | None) -> tuple[Seen, Progress]:
    """Both, with what the report knows besides; as they are where it knows no more."""
    known_at = max(seen.run.history.last_at, (progress.last.time if progress.last else None) or 0.0)
    if report is None or seen.run.ending is not None or not is_news(report, seen.run, known_at):
        return seen, progress
    checkpoint = seen.checkpoint
    if report.checkpoint > checkpoint.step:
        checkpoint = CheckpointView(step=report.checkpoint)
    last = progress.last
    if last is None or report.step > last.step or report.attempt > last.attempt:
        loss = report.loss if report.loss is not None else last.loss if last else None
        last = Metric(attempt=report.attempt, step=report.step, loss=loss, time=report.updated)
    return replace(seen, checkpoint=checkpoint, report=report), replace(progress, last=last)
