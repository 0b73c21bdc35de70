"""The mirror of a job: a local copy of its journal and metrics, with the layout of a run directory.

    <run root>/.kubernetes/<context>/<namespace>/<job>/
      remote.json     the job that this is a copy of, and how many bytes of each file were copied
      journal.jsonl   metrics.jsonl   spec.yaml   logs/

The data comes from any running pod of the job (`fetch`) or, if none runs, from the log of the ended
leader pod. While the remote leader is alive, this process locks the local journal as a leader does,
so that views show the job as led.
"""

import base64
import contextlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from pathlib import Path

from msgspec.structs import replace

from orchestrator.backends.kubernetes.api.api_errors import Forbidden
from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.api.pod_exec import Input, Streams
from orchestrator.backends.kubernetes.mirror.copied_files import (
    end_of_line,
    first_seq,
    has_trained,
    is_stopping,
    marked,
    put,
    with_last_metrics,
)
from orchestrator.backends.kubernetes.mirror.fetch import read_news
from orchestrator.backends.kubernetes.mirror.mirror_paths import IN_CLUSTER, REMOTE, is_mirror
from orchestrator.backends.kubernetes.mirror.pod_logs import (
    JOURNAL_MARK,
    METRICS_MARK,
    PodLogs,
    uid_of,
)
from orchestrator.backends.kubernetes.mirror.remote import Remote, read_remote, write_remote
from orchestrator.backends.kubernetes.mirror.report_lookup import newest_report
from orchestrator.backends.kubernetes.observe import object_fields
from orchestrator.backends.kubernetes.observe.object_fields import LABEL, leads
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import (
    CONFIG_MAPS,
    JOB_KINDS,
    PODS,
    Object,
    name_of,
)
from orchestrator.contract.codec import encode
from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.messages.actions import Ending
from orchestrator.contract.spec.kubernetes_spec import Kind
from orchestrator.contract.submission_payload import Handover, handover_from
from orchestrator.errors import BackendError, JobError, Unanswered, Unreachable
from orchestrator.job.reports.job_report import JobReport, is_newer, read_report, report_of
from orchestrator.job.stage import ENDED
from orchestrator.journal.journal import Entry, read, to_line
from orchestrator.journal.snapshot import replay
from orchestrator.posix.locks import try_lock
from orchestrator.seams import Completed

FETCH_S = 30.0
CANCEL_S = 30.0
SNAPSHOT_S = 60.0
LOG_AGAIN_S = (0.5, 1.0, 2.0)
"""Pauses between tries to read logs: a busy node, or one whose container just ended, may fail."""
LEARN_S = 10.0
"""Interval between searches for reports of a job whose pods do not answer."""
MOST_ASKED = 3
"""Pods that one refresh asks. If these fail, the others probably fail too."""


class Mirror:
    def __init__(self, path: Path, api: Api) -> None:
        self.run_dir = RunDir(path)
        self.api = api
        self.held: int | None = None
        """Descriptor of the locked journal while a leader is alive."""
        self.logs: PodLogs | None = None
        self.source: Object | None = None
        """The pod that answered last. It is asked first, which saves a list of all pods."""
        self.ended_leaders: set[str] = set()
        """Uids of ended leader pods whose logs were already read."""
        self.before: dict[Path, bytes] | None = None
        """The files that `expect` replaced, by path; None: no launch is being submitted."""
        self.stale: BackendError | None = None
        """Why the last refresh failed; None if it succeeded."""
        self.learned_at: float | None = None
        """When reports were last searched, monotonic."""
        self.stopping = False
        """Ranks were told to stop, so their last checkpoint and the end of the job are near."""

    @property
    def remote(self) -> Remote:
        return read_remote(self.run_dir.path)

    def write(self, remote: Remote) -> None:
        self.run_dir.make()
        write_remote(self.run_dir.path, remote)

    def expect(self, handover: Handover, namespace: str) -> None:
        """Record a launch before it is submitted, so that it is known here even if this process
        dies. `keep` or `forget` must follow."""
        job, launch = handover.job, handover.launch
        spec = launch.kubernetes_spec
        former = self.remote if job.resume and is_mirror(self.run_dir.path) else None
        remote = Remote(
            context=self.api.context,
            namespace=namespace,
            kind=spec.kind,
            job=launch.job,
            run_dir=launch.run_dir,
            python=spec.python,
            launch=launch.launch,
            settled=False,
            journal=former.journal if former else 0,
            metrics=former.metrics if former else 0,
        )
        self.before = {
            path: path.read_bytes() for path in self._written(launch.launch) if path.exists()
        }
        self.write(remote)
        self.run_dir.spec_of(launch.launch).write_text(handover.spec, encoding="utf-8")
        if not former or not self.run_dir.spec.exists():
            # Otherwise spec.yaml stays that of the launch that trained last, until this one trains.
            write_whole(self.run_dir.spec, handover.spec.encode())
        self.run_dir.report.unlink(missing_ok=True)
        known = read(self.run_dir.journal)[-1:] if former else ()
        guess = Entry(seq=known[0].seq + 1 if known else 1, event=job, actions=())
        put(self.run_dir.journal, remote.journal, to_line(guess))

    def _written(self, launch: int) -> tuple[Path, ...]:
        """Files that `expect` and the submitting command write."""
        run_dir = self.run_dir
        specs = (run_dir.spec, run_dir.spec_of(launch))
        return run_dir.path / REMOTE, *specs, run_dir.journal, run_dir.submitted, run_dir.report

    def keep(self) -> None:
        """The submission succeeded."""
        remote = self.remote
        self.write(replace(remote, settled=True))
        if not remote.journal:  # not a resume: remove the data of the former run
            put(self.run_dir.metrics, 0, b"")
            shutil.rmtree(self.run_dir.logs, ignore_errors=True)
        self.before = None

    def forget(self) -> None:
        """The submission failed and left nothing in the cluster: restore the former files."""
        before, self.before = self.before or {}, None
        if self.run_dir.path / REMOTE not in before:
            shutil.rmtree(self.run_dir.path, ignore_errors=True)
            return
        for path in self._written(self.remote.launch):
            if path in before:
                write_whole(path, before[path])
            else:
                path.unlink(missing_ok=True)

    def adopt(self, kind: Kind, namespace: str, job: Object) -> bool:
        """Create the mirror of a job in the cluster; false if it is not a job of ndctl."""
        name, launch = name_of(job), object_fields.launch_of(job)
        if is_mirror(self.run_dir.path) and self.remote.launch == launch:
            return True
        parcel = self.api.get(CONFIG_MAPS, namespace, names.config_map_of(name))
        if parcel is None or launch is None:
            return False
        handed = handover_from(contents(parcel))
        made_at = object_fields.seconds_of(job["metadata"]["creationTimestamp"])
        self.expect(replace(handed, job=replace(handed.job, at=made_at)), namespace)
        self.keep()
        return True

    @property
    def has_begun(self) -> bool:
        remote, path = self.remote, self.run_dir.journal
        return path.exists() and path.stat().st_size == remote.journal > 0

    def here(self, launch: LaunchPlan) -> LaunchPlan:
        remote, spec = self.remote, launch.kubernetes_spec
        context = None if remote.context == IN_CLUSTER else remote.context
        return replace(
            launch, kubernetes=replace(spec, context=context, namespace=remote.namespace)
        )

    @property
    def led_at(self) -> float | None:
        return self.remote.led_at if is_mirror(self.run_dir.path) else None

    @property
    def cluster(self) -> str:
        # Not that of the kubeconfig, which may have lost the context or be missing by now: then
        # `refresh` says so, and other jobs are listed.
        return self.remote.context

    # Updates

    def refresh(self) -> None:
        """Update the copy. Data that is not available now stays unchanged.

        Raises:
            BackendError: the API server or all asked nodes are unreachable, or a request was
            refused.
        """
        try:
            self._refresh()
        except BackendError as exc:
            self.stale = exc
            self._hold(False)
            raise
        self.stale = None

    def _refresh(self) -> None:
        remote = self.remote
        if self.source is not None:
            with contextlib.suppress(BackendError):  # it may be deleted; the list below shows it
                if self._fetch_from(self.source):
                    return
            self.source = None
        try:
            pods = self.pods(remote)
        except Unreachable:
            raise
        except BackendError:
            self._search_reports(remote, ())
            raise
        error = self._fetch_from_one_of(pods)
        if self.source is not None:
            if object_fields.is_leaving(self.source):
                # A terminating pod does not show that the job continues; Kubernetes has to be
                # asked.
                self.source = None
                self._hold(False)
            return
        if error is None:
            self._hold(False)
            self._from_logs(remote, pods)
        self._search_reports(remote, pods)
        if error is not None:
            raise error

    def _fetch_from_one_of(self, pods: Iterable[Object]) -> BackendError | None:
        """Make the first pod that answers the source; else return the last error."""
        running = [
            pod for pod in sorted(pods, key=_usefulness) if object_fields.phase_of(pod) == "Running"
        ]
        error: BackendError | None = None
        for pod in running[:MOST_ASKED]:
            try:
                if self._fetch_from(pod):
                    self.source = pod
                    return None
            except BackendError as exc:  # a pod keeps phase Running even if its node is dead
                error = exc
        return error

    def pods(self, remote: Remote) -> list[Object]:
        labels = f"{LABEL}={remote.job}"
        return list(self.api.list(PODS, remote.namespace, labels=labels).items)

    def _fetch_from(self, pod: Object) -> bool:
        """Copy everything new from a pod; false if the pod cannot answer."""
        while True:
            remote = self.remote
            answer = self._ask(remote, pod)
            if answer is None:
                return False
            if not self._take(remote, answer):
                return True

    def _ask(self, remote: Remote, pod: Object) -> bytes | None:
        """None if the command failed: the pod may have just started, or be about to end."""
        module = "orchestrator.backends.kubernetes.mirror.fetch"
        argv = [remote.python, "-P", "-m", module, remote.run_dir, str(remote.journal)]
        code, out, _ = self.api.exec(
            remote.namespace,
            name_of(pod),
            remote.container,
            [*argv, str(remote.metrics)],
            timeout_s=FETCH_S,
        )
        return out if code == 0 else None

    def _take(self, remote: Remote, answer: bytes) -> bool:
        """Apply an answer; returns whether the pod has more."""
        told, journal, state, metrics = read_news(answer)
        begun = remote.journal
        if told.launch < remote.launch:
            return False  # the leader has not started; the files are those of a former launch
        if journal and first_seq(journal) == 0:
            # The offset was inside a line, so the file is another one. Start again at the
            # beginning.
            self.write(replace(remote, journal=0, metrics=0))
            return False
        if journal and first_seq(journal) == 1:
            begun = 0  # another run of the same name, or the first fetch
        if journal:
            put(self.run_dir.journal, begun, journal)
            self.stopping = is_stopping(journal, before=self.stopping)
        if state:
            write_whole(self.run_dir.state, state)
        if metrics:
            local = self.run_dir.metrics
            put(local, local.stat().st_size if told.metrics_from and local.exists() else 0, metrics)
        self.write(
            replace(
                remote,
                settled=True,
                journal=begun + told.journal,
                metrics=told.metrics_from + told.metrics,
                led_at=self.api.clock.now() if told.led else remote.led_at,
            )
        )
        self._hold(told.led)
        if journal and not told.more:
            self._accept(told.launch)
        return told.more

    def _accept(self, launch: int) -> None:
        """Set `spec.yaml` to that of the newest launch that has trained, as the leader does."""
        path = self.run_dir.spec_of(launch)
        if path.exists() and has_trained(self.run_dir):
            spec = path.read_bytes()
            if spec != self.run_dir.spec.read_bytes():
                write_whole(self.run_dir.spec, spec)

    def _from_logs(self, remote: Remote, pods: Iterable[Object]) -> None:
        """Read the end of the journal from the log of the ended leader pod, once per pod.

        Raises:
            BackendError: earlier lines were never copied; a pod's log has only the last ones.
        """
        ended = [pod for pod in pods if object_fields.is_over(pod) and leads(pod)]
        for pod in ended:
            of_former = object_fields.launch_of(pod) != remote.launch
            if of_former or uid_of(pod) in self.ended_leaders:
                continue
            lines = self.lines(remote, pod)
            journal = marked(lines, JOURNAL_MARK)
            if journal:
                self.ended_leaders.add(uid_of(pod))
            begun = end_of_line(self.run_dir.journal, max(0, first_seq(journal) - 1))
            if begun is None or begun > remote.journal:
                there = RunDir(Path(remote.run_dir)).journal
                raise BackendError(
                    f"the log of pod {name_of(pod)}, which has ended, holds only the last lines of"
                    " the job's journal; earlier lines were never copied to this machine",
                    fix=f"the complete journal is {there}, on the volume that the pods mount",
                )
            if begun + len(journal) >= max(1, remote.journal):
                put(self.run_dir.journal, begun, journal)
                self._add_metrics(marked(lines, METRICS_MARK))
                self.write(replace(remote, settled=True, journal=begun + len(journal), metrics=0))

    def _add_metrics(self, told: bytes) -> None:
        """`told`: the first line of the metrics of the job, and the last ones."""
        local = self.run_dir.metrics
        known = local.read_bytes() if local.exists() else b""
        put(local, 0, with_last_metrics(known, told))

    def lines(self, remote: Remote, pod: Object) -> list[bytes]:
        """The output of a pod; empty if it cannot be read."""
        try:
            return list(self.api.log(remote.namespace, name_of(pod), remote.container))
        except BackendError:
            return []

    def _search_reports(self, remote: Remote, pods: Sequence[Object]) -> None:
        """Find a newer report of the job outside of its journal, at most every `LEARN_S`."""
        now = self.api.clock.monotonic()
        if self.learned_at is not None and now - self.learned_at < LEARN_S:
            return
        self.learned_at, run = now, replay(self.run_dir)
        if run.ending is not None:
            return
        begun = [pod for pod in sorted(pods, key=_usefulness) if object_fields.has_begun(pod)]
        report = newest_report(self.api, remote, run, begun[:MOST_ASKED])
        before = read_report(self.run_dir)
        if report is not None and (before is None or is_newer(report, before)):
            self._write_report(report)

    def remember(self, ending: Ending, why: str) -> None:
        """Record the end that the scheduler reported, to know it if the cluster is unreachable."""
        run = replay(self.run_dir)
        if run.job is None or run.ending is not None:
            return
        before, now = read_report(self.run_dir), self.api.clock.now()
        if before is not None and before.launch == self.remote.launch:
            if before.state in ENDED:
                return
            self._write_report(replace(before, state=ending, message=why, updated=now))
        else:
            self._write_report(replace(report_of(run, now), state=ending, message=why))

    def _write_report(self, report: JobReport) -> None:
        body = json.dumps(encode(report), indent=2)
        write_whole(self.run_dir.report, body.encode())

    def _hold(self, led: bool) -> None:
        if led and self.held is None:
            fd = os.open(self.run_dir.journal, os.O_RDWR | os.O_CREAT, 0o644)
            try_lock(fd)  # if another ndctl holds the lock, the effect is the same
            self.held = fd
        elif not led and self.held is not None:
            os.close(self.held)
            self.held = None

    def deletion(self) -> str:
        remote = self.remote
        resource = JOB_KINDS[remote.kind].resource
        try:
            about = self.api.about(resource, remote.namespace, remote.job)
        except BackendError:  # the status without this is still useful
            return ""
        if about is None or not object_fields.is_leaving(about):
            return ""
        meta = about["metadata"]
        return (
            f"{resource.kind} {remote.namespace}/{remote.job} was deleted at"
            f" {meta['deletionTimestamp']}; it and its pods stay until its finalizers are removed:"
            f" {', '.join(meta.get('finalizers') or ()) or 'none is left'}"
        )

    def let_go(self) -> None:
        self._hold(False)

    # Its logs

    def fetch_logs(self, hosts: Collection[str] = (), *, follow: bool = False) -> list[str]:
        """Write the output of pods to log files with the layout of a run directory.

        Args:
            hosts: only pods on these hosts, if any exist.
            follow: continue in background threads; call it again for new pods.

        Returns:
            A sentence for each log that could not be read completely.
        """
        remote = self.remote
        if self.logs is None:
            self.logs = PodLogs(self.run_dir, self.api, remote.namespace, remote.container)
        pods = self.pods(remote)
        pods = [pod for pod in pods if object_fields.node_of(pod) in hosts] or pods
        if follow:
            self.logs.follow(pods)
            return []
        missing = self.logs.fetch(pods)
        for wait_s in LOG_AGAIN_S:
            if not missing:
                break
            self.api.clock.sleep(wait_s)
            missing = self.logs.fetch([pod for pod, _ in missing])
        return [
            f"the log of pod {name_of(pod)} could not be read completely: {why.message}"
            for pod, why in missing
        ]

    # Its end

    def cancel(self, by: str) -> Completed | None:
        """Run `ndctl cancel` in a pod; None if no pod runs, answers, or may be asked. The caller
        then suspends the job, which also makes the ranks save and exit."""
        return self._run(["cancel", self.remote.job, "--no-wait", "--by", by], CANCEL_S)

    def snapshot(self) -> Completed | None:
        """Run `ndctl snapshot` in a pod; None as for `cancel`."""
        return self._run(["snapshot", self.remote.job, "--json"], SNAPSHOT_S)

    def profile(self, ranks: Sequence[int], steps: int, wait_s: float) -> Completed | None:
        """Run `ndctl profile` in a pod; None as for `cancel`."""
        named = ",".join(map(str, ranks))
        words = ["--ranks", named, "--steps", str(steps), "--timeout", f"{wait_s:g}", "--json"]
        return self._run(["profile", self.remote.job, *words], wait_s + SNAPSHOT_S)

    def exec_on(
        self,
        host: str,
        argv: Sequence[str],
        out: Callable[[bytes], object],
        err: Callable[[bytes], object],
        given: int | None,
    ) -> int:
        remote = self.remote
        pods = [pod for pod in self.pods(remote) if object_fields.node_of(pod) == host]
        running = [pod for pod in pods if object_fields.is_running(pod)]
        if not running:
            why = "no running pod" if pods else "no pod"
            raise JobError(
                f"{remote.job} has {why} on node {host}", fix=f"ndctl describe {remote.job}"
            )
        pod = name_of(running[0])
        source = None if given is None else Input(given, remote.python)
        streams = Streams(out=out, err=err, given=source)
        return self.api.stream_exec(remote.namespace, pod, remote.container, argv, streams)

    def _run(self, words: Sequence[str], timeout_s: float) -> Completed | None:
        """Run a command of ndctl in the first pod that answers."""
        remote = self.remote
        running = filter(object_fields.is_running, sorted(self.pods(remote), key=_usefulness))
        root = str(Path(remote.run_dir).parent)
        argv = [remote.python, "-P", "-m", "orchestrator", *words, f"--run-root={root}"]
        for pod in islice(running, MOST_ASKED):
            with contextlib.suppress(Unanswered, Forbidden):
                code, out, err = self.api.exec(
                    remote.namespace, name_of(pod), remote.container, argv, timeout_s=timeout_s
                )
                return Completed(code, out.decode().strip(), err.decode().strip())
        return None


def _usefulness(pod: Object) -> tuple[bool, bool, bool, str]:
    """Sort key: the leader first, because it sees its own writes at once; then other pods, then
    terminating ones, then those that are not ready (their node may be unreachable)."""
    silent = "Ready" not in object_fields.conditions_of(pod)
    return silent, object_fields.is_leaving(pod), not leads(pod), name_of(pod)


def contents(config_map: Object) -> dict[str, bytes]:
    """The files in a ConfigMap."""
    plain = {key: text.encode() for key, text in (config_map.get("data") or {}).items()}
    packed = config_map.get("binaryData") or {}
    return plain | {key: base64.b64decode(text) for key, text in packed.items()}
