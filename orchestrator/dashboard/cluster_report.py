"""Adds the last report of a leader in a cluster to an older copy of its journal.

On Kubernetes, ndctl reads a local copy of the journal. The copy ends at the last successful read
from the pods. The leader also writes a report to the cluster, which ndctl saves as `report.json`.
If the pods are gone, that report may contain later steps and checkpoints than the copy.
"""

from msgspec.structs import replace

from orchestrator.dashboard.job_view.replayed_job import CheckpointView, ReplayedJob
from orchestrator.dashboard.metrics import Metric, Progress
from orchestrator.job.reports.job_report import JobReport, is_news


def apply_report(
    seen: ReplayedJob, progress: Progress, report: JobReport | None
) -> tuple[ReplayedJob, Progress]:
    """`seen` and `progress` with newer values from `report`; unchanged if it has no news."""
    known_at = max(seen.run.last_at, (progress.last.time if progress.last else None) or 0.0)
    if report is None or seen.run.ending is not None or not is_news(report, seen.run, known_at):
        return seen, progress
    checkpoint = seen.checkpoint
    if report.checkpoint > checkpoint.step:  # the report has no time for it
        checkpoint = CheckpointView(step=report.checkpoint)
    last = progress.last
    if last is None or report.step > last.step or report.attempt > last.attempt:
        loss = report.loss if report.loss is not None else last.loss if last else None
        last = Metric(attempt=report.attempt, step=report.step, loss=loss, time=report.updated)
    return replace(seen, checkpoint=checkpoint, report=report), replace(progress, last=last)
