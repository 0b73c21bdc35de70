"""A short report of a job, for places without its journal: the cluster's object, and copies."""

from collections.abc import Mapping

from msgspec import Struct

from ndctl.rank.regular_file import read_regular
from orchestrator.contract.codec import Invalid, decode
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.read_json import read_json
from orchestrator.diagnosis.cause.verdict import NOBODY
from orchestrator.job.stage import State
from orchestrator.job.state import Run


class JobReport(Struct, frozen=True, kw_only=True):
    launch: int
    """The number of the submission."""
    state: State
    message: str
    """Why the job is in that state, in one line."""
    step: int
    """The last step that is known to be done."""
    steps: int
    attempt: int
    updated: float
    """The time of the report in Unix seconds."""
    checkpoint: int = 0
    """Step of the newest complete checkpoint; 0 for none."""
    culprit: str = ""
    """The culprit of the last incident; empty if there is none."""
    loss: float | None = None


def report_of(run: Run, at: float) -> JobReport:
    """The report at the time `at`. The job must have been submitted."""
    assert run.job is not None
    last = run.history.incidents[-1] if run.history.incidents else None
    blamed = last is not None and last.culprit != NOBODY
    return JobReport(
        launch=run.job.launch.launch,
        state=run.state,
        message=" ".join(run.stage.reason.split()),
        step=max(run.attempt.step, run.progress.saved),
        steps=run.job.steps,
        attempt=run.attempt.number,
        updated=at,
        checkpoint=run.progress.saved,
        culprit=str(last.culprit) if last is not None and blamed else "",
    )


def is_news(report: JobReport, run: Run, known_at: float) -> bool:
    """The report is of the same launch, and newer than `known_at`."""
    same = run.job is not None and run.job.launch.launch == report.launch
    return same and report.updated > known_at


def is_newer(report: JobReport, before: JobReport) -> bool:
    return (report.launch, report.updated) > (before.launch, before.updated)


def read_report(run_dir: RunDir) -> JobReport | None:
    """The report in a copy of a run directory; None if there is none that this version reads."""
    try:
        body = read_json(read_regular(run_dir.report))
        return decode(JobReport, body) if isinstance(body, Mapping) else None
    except (OSError, ValueError, Invalid):
        return None
