"""Reports the state of the job to Kubernetes: events on the job object, ConfigMap `JOB-state`, and
the progress that Kubeflow Trainer shows.

A thread of its own sends all requests, so an unreachable API server never delays the leader's loop.
"""

import hashlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ndctl.rank.fence import GivenUp
from orchestrator.backends.kubernetes.api.api_errors import Conflict
from orchestrator.backends.kubernetes.leader.own_job import OwnJob
from orchestrator.backends.kubernetes.leader.trainer_status import TrainerServer, status_body
from orchestrator.backends.kubernetes.observe.reports import stamp, to_annotation, to_data
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import CONFIG_MAPS, JobKind, owner_reference
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import Event
from orchestrator.errors import BackendError, Unanswered
from orchestrator.job.reports.job_news import Budget, News, admit, news_of
from orchestrator.job.reports.job_report import JobReport, report_of
from orchestrator.job.reports.last_steps import Pace, pace_of_last
from orchestrator.job.state import Run
from orchestrator.seams import Clock

log = logging.getLogger(__name__)

MOST_WAITING = 64
"""Most reports that wait for an unreachable API server; the oldest are dropped."""
SOON_S = 1.0
"""Interval between two writes of a changing state."""
STEP_S = 30.0
"""Interval if only the step changed, because each write wakes all watchers."""
BACKOFF_S = (2.0, 5.0, 15.0, 30.0)
REFUSED_S = 600.0
"""Pause before a rejected request is retried: an administrator may grant the right."""
FAREWELL_S = 5.0
"""Time limit for the final report; the pod ends then."""


@dataclass(slots=True)
class Channel:
    """One report channel. It pauses by itself after an error."""

    what: str
    again_at: float = 0.0
    failures: int = 0
    said: str = ""
    """The warning to log once."""

    def told(self, clock: Clock, tell: Callable[[], object]) -> bool:
        """Whether `tell` succeeded."""
        # The server failed or refused a moment ago. Other channels continue in the meantime.
        if clock.monotonic() < self.again_at:
            return False
        try:
            tell()
        except (BackendError, OSError) as exc:
            # An unreachable server returns by itself, so retry soon. A rejection stays until a
            # person changes something.
            silent = isinstance(exc, Unanswered | OSError)
            wait_s = BACKOFF_S[min(self.failures, len(BACKOFF_S) - 1)] if silent else REFUSED_S
            self.again_at, self.failures = clock.monotonic() + wait_s, self.failures + 1
            # The same warning at each retry would fill the leader's log.
            if self.said != str(exc):
                log.warning("%s; training continues: %s", self.what, exc)
                self.said = str(exc)
            return False
        self.failures, self.said = 0, ""
        return True


class Written(Struct, frozen=True, kw_only=True):
    report: JobReport
    at: float
    """Monotonic."""


def due_s(report: JobReport, written: Written | None, now: float) -> float:
    """Seconds until the next write is due; 0: now."""
    # A new leader does not know what the former one wrote, so it writes at once.
    if written is None:
        return 0.0
    before = replace(written.report, updated=report.updated, step=report.step, loss=report.loss)
    wait_s = STEP_S if before == report else SOON_S
    return max(0.0, written.at + wait_s - now)


class LeaderReporter:
    def __init__(
        self,
        own: OwnJob,
        run_dir: RunDir,
        guard: Callable[[], None],
        pod: str,
        trainer: TrainerServer | None,
    ) -> None:
        """
        Args:
            guard: raises an OSError if this leader may no longer write.
            pod: name of the leader's pod.
            trainer: of the TrainJob, if it takes reports.
        """
        self.own, self.run_dir, self.guard, self.pod, self.trainer = (
            own,
            run_dir,
            guard,
            pod,
            trainer,
        )
        self.api, self.clock, self.kind = own.api, own.api.clock, own.kind
        self.namespace, self.launch = own.namespace, own.launch
        self.lock = threading.Lock()
        self.woken = threading.Event()
        self.closing = False
        self.run: Run | None = None
        self.waiting: deque[News] = deque(maxlen=MOST_WAITING)
        self.budget = Budget()
        self.written: Written | None = None
        self.progressed: Written | None = None
        self.events = Channel("cannot create events of the job")
        self.state = Channel(f"ConfigMap {names.state_map_of(self.launch.job)} cannot be written")
        self.owner = Channel("cannot set the owner of ConfigMap JOB-state")
        self.owned = False
        self.progress = Channel("Kubeflow Trainer rejected the job's progress")
        self.thread = threading.Thread(target=self._work, name="reporter", daemon=True)

    def begin(self) -> None:
        self.own.begin()
        self.thread.start()

    # Called by the leader's loop, which must not block

    def hear(self, before: Run, event: Event, after: Run) -> None:
        news = list(news_of(before, event, after))
        with self.lock:
            self.run = after
            for one in news:
                # A job that fails in a loop would flood the namespace with events.
                self.budget, told = admit(self.budget, one)
                if told is not None:
                    self.waiting.append(told)
        # A step alone does not wake the thread: steps are written at intervals.
        if news or (before.state, before.attempt.number) != (after.state, after.attempt.number):
            self.woken.set()

    def close(self) -> None:
        self.closing = True
        self.woken.set()
        self.thread.join(FAREWELL_S)

    # Its thread

    def _work(self) -> None:
        while True:
            # A stop request is checked first, so that everything before it is reported.
            closing = self.closing
            try:
                # A leader that lost its lock must not overwrite the report of its successor.
                self.guard()
                wait_s = self._tell(last=closing)
            except GivenUp:
                return  # another leader's report is newer
            except OSError as exc:
                log.warning("cannot check the rights to report the job's progress: %s", exc)
                wait_s = STEP_S
            if closing:
                return
            self.woken.wait(wait_s)
            self.woken.clear()

    def _tell(self, *, last: bool = False) -> float:
        """Send what is due (at the `last` call everything); return seconds until the next."""
        # The process ends after this. A pause after an error would lose the final state.
        if last:
            for channel in (self.events, self.state, self.owner, self.progress):
                channel.again_at = 0.0
        with self.lock:
            run = self.run
        # The leader's loop has reported nothing yet.
        if run is None or run.job is None:
            return STEP_S
        now, pace = self.clock.monotonic(), _pace(self.run_dir.metrics)
        report = self._report(run, pace)
        self._tell_news(report)
        if last or due_s(report, self.written, now) <= 0:
            self._write_state(report)
        if self.trainer is not None and (last or due_s(report, self.progressed, now) <= 0):
            self._tell_trainer(self.trainer, report, pace)
        waits = [STEP_S, due_s(report, self.written, now)]
        if self.waiting:
            waits.append(self.events.again_at - self.clock.monotonic())
        return max(SOON_S, min(waits))

    def _report(self, run: Run, pace: Pace | None) -> JobReport:
        report = report_of(run, self.clock.now())
        # The metrics are from the previous attempt, whose later steps may be done again.
        if pace is None or pace.attempt != run.attempt.number:
            return report
        return replace(report, step=max(report.step, pace.step), loss=pace.loss)

    def _tell_news(self, report: JobReport) -> None:
        while self.waiting:
            with self.lock:
                news = self.waiting[0]
            # Keep the order: a later event must not be sent before this one.
            if not self.events.told(self.clock, partial(self._post, news, report)):
                return
            with self.lock:
                # While the request was sent, a full queue may have dropped this item.
                if self.waiting and self.waiting[0] is news:
                    self.waiting.popleft()

    def _post(self, news: News, report: JobReport) -> None:
        self.own.seen.wait(SOON_S)  # for the object's uid, by which `kubectl describe` finds it
        item = event_of(news, report, self.kind, self.namespace, self.launch.job)
        # Without the uid the event is still listed, but `kubectl describe` does not find it.
        item["involvedObject"] |= {"uid": self.own.uid} if self.own.uid else {}
        item["reportingInstance"] = item["source"]["host"] = self.pod
        try:
            self.api.create(item, self.namespace)
        except Conflict:
            return  # it was created, but the answer was lost

    def _write_state(self, report: JobReport) -> None:
        change = {"data": to_data(report), "metadata": {"annotations": to_annotation(report)}}
        if not self.state.told(self.clock, partial(self._change_map, change)):
            return
        self.written = Written(report=report, at=self.clock.monotonic())
        if (job := self.own.job) is not None and not self.owned:
            # Kubernetes then deletes the ConfigMap with the job. In its own request, because
            # setting an owner may need more rights than the rest.
            mine = {"metadata": {"ownerReferences": [owner_reference(self.kind.resource, job)]}}
            self.owned = self.owner.told(self.clock, partial(self._change_map, mine))

    def _change_map(self, change: dict[str, Any]) -> None:
        self.api.merge(CONFIG_MAPS, self.namespace, names.state_map_of(self.launch.job), change)

    def _tell_trainer(self, server: TrainerServer, report: JobReport, pace: Pace | None) -> None:
        body = status_body(report, pace)
        if self.progress.told(self.clock, partial(server.post, body)):
            self.progressed = Written(report=report, at=self.clock.monotonic())


def _pace(metrics: Path) -> Pace | None:
    try:
        return pace_of_last(metrics)
    except OSError:  # if the storage is unreachable, only the journal reports
        return None


def event_of(
    news: News, report: JobReport, kind: JobKind, namespace: str, job: str
) -> dict[str, Any]:
    """A fixed name makes repeated creates the same event."""
    digest = hashlib.sha256(f"{news.reason} {news.at} {news.text}".encode()).hexdigest()[:16]
    at, resource = stamp(news.at), kind.resource
    name, notes = f"{job}.{digest}", to_annotation(report)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": namespace, "annotations": notes},
        "involvedObject": {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "name": job,
            "namespace": namespace,
        },
        "reason": news.reason,
        "message": news.text,
        "type": "Warning" if news.warning else "Normal",
        "count": 1,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "source": {"component": "ndctl"},
        "reportingComponent": "ndctl.dev/leader",
    }
