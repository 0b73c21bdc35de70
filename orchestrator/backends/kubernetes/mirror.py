"""A job seen from outside: a copy of its journal and metrics, as a run directory that views read.

    <run root>/.kubernetes/<context>/<namespace>/<job>/
      remote.json     whose copy it is, and how much of each file has come
      journal.jsonl   metrics.jsonl   spec.yaml   logs/

What comes is what any running pod of the job says (`fetch`), or when none runs any more what the
leader's pod printed at its end. While a leader lives this process holds the journal as the leader
does, so that views see that it lives.
"""

import base64
import contextlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from orchestrator.backends.kubernetes import fields
from orchestrator.backends.kubernetes.api import Api
from orchestrator.backends.kubernetes.fetch import read_news
from orchestrator.backends.kubernetes.fields import LABEL, leads
from orchestrator.backends.kubernetes.places import IN_CLUSTER, REMOTE, folder_of, is_mirror
from orchestrator.backends.kubernetes.podlogs import (
    JOURNAL_MARK,
    METRICS_MARK,
    PodLogs,
    uid_of,
)
from orchestrator.backends.kubernetes.refusals import Missing
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import (
    CONFIG_MAPS,
    JOB_KINDS,
    PODS,
    Object,
    name_of,
)
from orchestrator.contract.handover import Handover, handover_from
from orchestrator.contract.kubernetes import Kind, KubernetesSpec
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.read_json import read_json
from orchestrator.contract.rundir import RunDir
from orchestrator.contract.whole import write_whole
from orchestrator.errors import BackendError, JobError, Unanswered
from orchestrator.locks import try_lock
from orchestrator.seams import Clock, Completed
from orchestrator.supervise.log import Entry, read, to_line

FETCH_S = 30.0
CANCEL_S = 30.0
MOST_ASKED = 3
"""Pods, in one look: where none of these can say, all others would hardly either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """`remote.json`."""

    context: str
    namespace: str
    kind: Kind
    job: str
    run_dir: str
    """Inside the pods."""
    python: str
    """The interpreter there."""
    launch: int
    journal: int = 0
    """Bytes that have come; what lies behind them is this machine's own guess."""
    metrics: int = 0


def open_mirror(path: Path, environ: Mapping[str, str], clock: Clock) -> "Mirror":
    """One that was made before."""
    context = read_json((path / REMOTE).read_text())["context"]
    api = Api(None if context == IN_CLUSTER else context, environ, clock)
    return Mirror(path, api)


def seek_mirror(
    run_root: Path,
    job: str,
    context: str | None,
    namespace: str | None,
    environ: Mapping[str, str],
    clock: Clock,
) -> "Mirror":
    """Of a job of the cluster, seen before or not. Raises JobError where there is none."""
    api = Api(context, environ, clock)
    space = namespace or api.namespace
    made = Mirror(folder_of(run_root, api.context, space, job), api)
    for kind, one in JOB_KINDS.items():
        try:
            found = api.get(one.resource, space, job)
        except Missing:
            continue  # the cluster has no such kind
        if found is not None and made.adopt(kind, space, found):
            return made
    if is_mirror(made.run_dir.path):
        return made
    raise JobError(
        f"no job {job!r} in namespace {space} of {api.context} ({api.server})",
        fix=f"`ndctl list --backend kubernetes -n {space}` lists those that there are",
    )


def mirrors_at(
    run_root: Path,
    context: str | None,
    namespace: str | None,
    environ: Mapping[str, str],
    clock: Clock,
) -> list["Mirror"]:
    """Of all of ndctl's jobs in a namespace."""
    api = Api(context, environ, clock)
    space = namespace or api.namespace
    found = []
    for kind, one in JOB_KINDS.items():
        with contextlib.suppress(Missing):
            for job in api.list(one.resource, space, labels=LABEL).items:
                made = Mirror(folder_of(run_root, api.context, space, name_of(job)), api)
                if made.adopt(kind, space, job):
                    found.append(made)
    return sorted(found, key=lambda one: one.run_dir.path.name)


class Mirror:
    def __init__(self, path: Path, api: Api) -> None:
        self.run_dir = RunDir(path)
        self.api = api
        self.held: int | None = None
        """The journal's file, while a leader lives."""
        self.logs: PodLogs | None = None
        self.speaker: Object | None = None
        """The pod that answered last: asked again, without a list of all pods before."""
        self.heard: set[str] = set()
        """Leaders' pods, by uid, that have ended and whose last words are known."""

    @property
    def remote(self) -> Remote:
        return Remote(**read_json((self.run_dir.path / REMOTE).read_text()))

    def write(self, remote: Remote) -> None:
        self.run_dir.make()
        write_whole(self.run_dir.path / REMOTE, json.dumps(asdict(remote), indent=2).encode())

    def expect(self, handover: Handover, namespace: str) -> None:
        """A launch has been handed to the cluster: until its leader says so, say it here."""
        job, launch = handover.job, handover.launch
        spec = launch.kubernetes or KubernetesSpec()
        former = self.remote if job.resume and is_mirror(self.run_dir.path) else None
        remote = Remote(
            context=self.api.context,
            namespace=namespace,
            kind=spec.kind,
            job=launch.job,
            run_dir=launch.run_dir,
            python=spec.python,
            launch=launch.launch,
            journal=former.journal if former else 0,
            metrics=former.metrics if former else 0,
        )
        self.write(remote)
        self.run_dir.spec.write_text(handover.spec)
        known = read(self.run_dir.journal)[-1:] if former else ()
        guess = Entry(seq=known[0].seq + 1 if known else 1, event=job, actions=())
        put(self.run_dir.journal, remote.journal, to_line(guess))
        if not former:
            put(self.run_dir.metrics, 0, b"")
            shutil.rmtree(self.run_dir.logs, ignore_errors=True)

    def adopt(self, kind: Kind, namespace: str, job: Object) -> bool:
        """Learn of a job that is in the cluster; whether it is one of ndctl's."""
        name, launch = name_of(job), fields.launch_of(job)
        if is_mirror(self.run_dir.path) and self.remote.launch == launch:
            return True
        parcel = self.api.get(CONFIG_MAPS, namespace, names.config_map_of(name))
        if parcel is None or launch is None:
            return False
        handed = handover_from(contents(parcel))
        made_at = fields.seconds_of(job["metadata"]["creationTimestamp"])
        self.expect(replace(handed, job=replace(handed.job, at=made_at)), namespace)
        return True

    @property
    def has_begun(self) -> bool:
        remote, path = self.remote, self.run_dir.journal
        return path.exists() and path.stat().st_size == remote.journal > 0

    def here(self, launch: LaunchPlan) -> LaunchPlan:
        remote, spec = self.remote, launch.kubernetes or KubernetesSpec()
        context = None if remote.context == IN_CLUSTER else remote.context
        return replace(
            launch, kubernetes=replace(spec, context=context, namespace=remote.namespace)
        )

    # What has happened

    def refresh(self) -> None:
        """Bring the copy up to date. What cannot be had now stays as it is.

        Raises BackendError where the API server or none of the pods' nodes answers, or one refuses.
        """
        remote = self.remote
        if self.speaker is not None:
            with contextlib.suppress(BackendError):  # it may be gone; the list below tells
                if self._hear(self.speaker):
                    return
            self.speaker = None
        pods = self.pods(remote)
        running = [pod for pod in sorted(pods, key=_usefulness) if fields.is_running(pod)]
        unheard: BackendError | None = None
        for pod in running[:MOST_ASKED]:
            try:
                heard = self._hear(pod)
            except BackendError as exc:  # its node may be dead, with the phase that it had
                unheard = exc
                continue
            if heard:
                self.speaker = pod
                return
        if unheard is not None:
            raise unheard
        self._hold(False)
        self._from_logs(remote, pods)

    def pods(self, remote: Remote) -> list[Object]:
        labels = f"{LABEL}={remote.job}"
        return list(self.api.list(PODS, remote.namespace, labels=labels).items)

    def _hear(self, pod: Object) -> bool:
        """Take all that a pod has to say; False where it cannot say."""
        while True:
            remote = self.remote
            done = self._ask(remote, pod)
            if done is None:
                return False
            if not self._take(remote, done):
                return True

    def _ask(self, remote: Remote, pod: Object) -> bytes | None:
        """None where this pod cannot say: it may just have begun, or be about to end."""
        module = "orchestrator.backends.kubernetes.fetch"
        argv = [remote.python, "-m", module, remote.run_dir, str(remote.journal)]
        code, out, _ = self.api.exec(
            remote.namespace,
            name_of(pod),
            names.CONTAINERS[remote.kind],
            [*argv, str(remote.metrics)],
            timeout_s=FETCH_S,
        )
        return out if code == 0 else None

    def _take(self, remote: Remote, answer: bytes) -> bool:
        """Whether there is more."""
        told, journal, state, metrics = read_news(answer)
        begun = remote.journal
        if told.launch < remote.launch:
            return False  # its leader has yet to begin, and there is what a former launch left
        if journal and _first_seq(journal) == 0:
            self.write(replace(remote, journal=0, metrics=0))
            return False  # the next look begins anew
        if journal and _first_seq(journal) == 1:
            begun = 0  # another run of the same name, or the first look
        if journal:
            put(self.run_dir.journal, begun, journal)
        if state:
            write_whole(self.run_dir.state, state)
        if metrics:
            local = self.run_dir.metrics
            put(local, local.stat().st_size if told.metrics_from and local.exists() else 0, metrics)
        self.write(
            replace(
                remote,
                journal=begun + told.journal,
                metrics=told.metrics_from + told.metrics,
            )
        )
        self._hold(told.led)
        return told.more

    def _from_logs(self, remote: Remote, pods: Iterable[Object]) -> None:
        """A leader's last words, in the log of its pod that has ended: read once.

        Raises BackendError where lines before them never came here: a pod's log is short.
        """
        for pod in pods:
            if not fields.is_over(pod) or not leads(pod) or fields.launch_of(pod) != remote.launch:
                continue
            if uid_of(pod) in self.heard:
                continue
            lines = self.lines(remote, pod)
            journal = _marked(lines, JOURNAL_MARK)
            if journal:
                self.heard.add(uid_of(pod))
            begun = behind_line(self.run_dir.journal, max(0, _first_seq(journal) - 1))
            if begun is None or begun > remote.journal:
                there = RunDir(Path(remote.run_dir)).journal
                raise BackendError(
                    f"the log of pod {name_of(pod)}, which has ended, has only the last lines of"
                    " the job's journal, and those before have not been seen from here",
                    fix=f"the whole journal is {there}, on the volume that the pods have mounted",
                )
            if begun + len(journal) >= max(1, remote.journal):
                put(self.run_dir.journal, begun, journal)
                put(self.run_dir.metrics, 0, _marked(lines, METRICS_MARK))
                self.write(replace(remote, journal=begun + len(journal), metrics=0))

    def lines(self, remote: Remote, pod: Object) -> list[bytes]:
        """What a pod has printed; nothing where its node does not say."""
        container = names.CONTAINERS[remote.kind]
        try:
            return list(self.api.log(remote.namespace, name_of(pod), container))
        except BackendError:
            return []

    def _hold(self, led: bool) -> None:
        if led and self.held is None:
            fd = os.open(self.run_dir.journal, os.O_RDWR | os.O_CREAT, 0o644)
            try_lock(fd)  # if another ndctl has it, that says the same
            self.held = fd
        elif not led and self.held is not None:
            os.close(self.held)
            self.held = None

    # Its logs

    def fetch_logs(self, hosts: Collection[str] = (), *, follow: bool = False) -> None:
        """The ranks' logs as a run directory has them, of what the pods printed.

        hosts: only of these, where pods of theirs are left.
        """
        remote = self.remote
        if self.logs is None:
            container = names.CONTAINERS[remote.kind]
            self.logs = PodLogs(self.run_dir, self.api, remote.namespace, container)
        pods = self.pods(remote)
        pods = [pod for pod in pods if fields.node_of(pod) in hosts] or pods
        if follow:
            self.logs.follow(pods)
        else:
            self.logs.fetch(pods)

    # Its end

    def cancel(self) -> Completed | None:
        """Have `ndctl cancel` done in a pod; None where none runs, or none answers."""
        remote = self.remote
        running = filter(fields.is_running, sorted(self.pods(remote), key=_usefulness))
        root = str(Path(remote.run_dir).parent)
        argv = [remote.python, "-m", "orchestrator", "cancel", remote.job, "--no-wait"]
        for pod in islice(running, MOST_ASKED):
            with contextlib.suppress(Unanswered):
                code, out, err = self.api.exec(
                    remote.namespace,
                    name_of(pod),
                    names.CONTAINERS[remote.kind],
                    [*argv, f"--run-root={root}"],
                    timeout_s=CANCEL_S,
                )
                return Completed(code, out.decode().strip(), err.decode().strip())
        return None


def _usefulness(pod: Object) -> tuple[bool, bool, str]:
    """The leader's first: it sees its own writes at once. Last those whose node is not heard."""
    return "Ready" not in fields.conditions_of(pod), not leads(pod), name_of(pod)


def contents(config_map: Object) -> dict[str, bytes]:
    """The files in a ConfigMap."""
    plain = {key: text.encode() for key, text in (config_map.get("data") or {}).items()}
    packed = config_map.get("binaryData") or {}
    return plain | {key: base64.b64decode(text) for key, text in packed.items()}


def put(path: Path, offset: int, data: bytes) -> None:
    """`data` from `offset` on, and nothing behind it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        stack.callback(os.close, fd)
        os.ftruncate(fd, offset)
        os.pwrite(fd, data, offset)


def behind_line(path: Path, number: int) -> int | None:
    """Bytes of a journal up to the end of that line; None where it has fewer."""
    if not number:
        return 0
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        size = sum(map(len, islice(file, number - 1)))
        last = file.readline()
        return size + len(last) if last.endswith(b"\n") else None
    return None


def _first_seq(journal: bytes) -> int:
    """0 where it does not begin with a line: the file is another one than it was."""
    try:
        return int(read_json(journal.partition(b"\n")[0])["seq"])
    except (ValueError, KeyError, TypeError):
        return 0


def _marked(lines: Iterable[bytes], mark: str) -> bytes:
    found = [line for line in lines if line.startswith(mark.encode())]
    return b"".join(line.removeprefix(mark.encode()) + b"\n" for line in found)
