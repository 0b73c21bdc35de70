"""The agent in a pod; `pod_start.py` starts it.

The environment identifies the pod, and the mounted ConfigMap describes the job. The pod of node
rank 0 leads and writes the run directory of a new launch; the other pods wait for it.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Self

from msgspec import Struct

from orchestrator.agent.log_forwarder import LogForwarder
from orchestrator.backends.kubernetes.mirror.pod_logs import JOURNAL_MARK, METRICS_MARK
from orchestrator.backends.kubernetes.render.names import KIND_VARIABLE
from orchestrator.contract.codec import Invalid
from orchestrator.contract.files import env, exit_codes
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.submission_payload import Handover, handover_from
from orchestrator.errors import BackendError, InUse, JobError
from orchestrator.job.state import Run
from orchestrator.job.transitions import step
from orchestrator.journal.run_dir_init import begin, is_same_launch, read_folder
from orchestrator.journal.snapshot import recall, replay
from orchestrator.seams import Clock
from orchestrator.system import SystemClock, log_to_stderr

log = logging.getLogger("orchestrator.kubernetes")

FOLDER = "/etc/ndctl/submission"
RANKS = ("JOB_COMPLETION_INDEX", "RANK", "PET_NODE_RANK")
"""Variables with the node rank, set by JobSet, by Trainer v2 and by the training operator."""
OPERATORS = ("PET_", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun would use as its defaults."""
WAIT_S = 1.0
SAY_S = 30.0
OTHERS_END_S = 30.0
"""Seconds; a kubelet may take this long to report the end of a pod."""
NOT_WHAT_RUNS = (
    "the applied objects differ from the running launch %s in %s, which continues unchanged."
    " To run them: `ndctl cancel`, then `ndctl submit --resume`"
)


class Pod(Struct, frozen=True, kw_only=True):
    """Identity of this pod, from the downward API and the operator."""

    host: str
    """The node's name."""
    address: str
    node_rank: int
    folder: Path
    kind: str = ""
    """Kind of the job object; empty if an older ndctl created it."""

    @classmethod
    def from_mapping(cls, environ: Mapping[str, str]) -> Self:
        """Raises KeyError with the name of a missing variable."""
        said = next((environ[name] for name in RANKS if environ.get(name)), None)
        if said is None:
            raise KeyError(" or ".join(RANKS))
        return cls(
            host=environ["NDCTL_NODE_NAME"],
            address=environ["NDCTL_POD_IP"],
            node_rank=int(said),
            folder=Path(environ.get(env.SUBMISSION, FOLDER)),
            kind=environ.get(KIND_VARIABLE, ""),
        )

    @property
    def leads(self) -> bool:
        return self.node_rank == 0


def run(environ: Mapping[str, str]) -> int:
    """Run the pod and return its exit code.

    The operator ends the whole job at a final exit code of one pod. So unexpected errors give a
    code that restarts the pod.
    """
    log_to_stderr()
    try:
        return _run(environ)
    except (OSError, JobError) as exc:
        log.critical("this pod failed, a replacement may succeed: %s", exc)
    except Exception as exc:
        log.exception("unexpected error in this pod")
        log.critical("unexpected error in this pod, a replacement will retry: %r", exc)
    return exit_codes.LEADER_LOST


def _run(environ: Mapping[str, str]) -> int:
    clock = SystemClock()
    try:
        pod = Pod.from_mapping(environ)
        handover = handover_from(read_folder(pod.folder))
    except (KeyError, ValueError, OSError, Invalid) as exc:
        log.critical("this pod does not belong to a job of this version of ndctl: %s", exc)
        return exit_codes.REFUSED
    run_dir = RunDir(Path(handover.launch.run_dir))
    token = environ.get(env.TOKEN)
    terminate = partial(os.kill, os.getpid(), signal.SIGTERM)
    hear_late(partial(_was_deleted, handover, environ, clock), terminate)
    try:
        if pod.leads:
            begun = begin(run_dir, handover, clock, token=not token)
            same = is_same_launch(run_dir, handover, begun)
            if not same:
                log.error(NOT_WHAT_RUNS, handover.launch.launch, run_dir.path)
            _own(handover, environ, clock, same)
        else:
            see = partial(_see_to_the_leader, pod, handover, environ, clock)
            begun = await_launch(run_dir, handover.launch.launch, clock, see)
    except InUse:
        raise
    except JobError as exc:
        log.critical("%s", exc)
        return exit_codes.FAILED
    if begun.ending is not None:
        return _has_ended(pod, handover, begun, run_dir)
    theirs = begun.job and begun.job.launch.kubernetes and begun.job.launch.kubernetes.kind
    if pod.kind and theirs and pod.kind != theirs:
        words = "this pod belongs to a %s, but launch %s in %s to a %s of the same name: delete one"
        log.critical(words, pod.kind, handover.launch.launch, run_dir.path, theirs)
        return exit_codes.FAILED
    return _be_agent(pod, handover, run_dir, environ)


def hear_late(is_leaving: Callable[[], bool], leave: Callable[[], object]) -> threading.Thread:
    """Exit if SIGTERM arrived before this process handled it.

    The kernel drops SIGTERM for the first process of a container without a handler. A pod that is
    deleted in its first moment would then run until SIGKILL. The API server knows of the deletion
    before the kubelet sends the signal, so asking once is enough.
    """

    def ask() -> None:
        try:
            leaving = is_leaving()
        except BackendError as exc:
            log.info("failed to check whether this pod was deleted: %s", exc)
            return
        if leaving:
            log.warning("exiting: this pod was deleted before its process handled signals")
            leave()

    thread = threading.Thread(target=ask, name="hear-late", daemon=True)
    thread.start()
    return thread


def _was_deleted(handover: Handover, environ: Mapping[str, str], clock: Clock) -> bool:
    from orchestrator.backends.kubernetes.backend import KubernetesBackend

    return KubernetesBackend(environ, clock).is_leaving(handover.launch)


def await_launch(run_dir: RunDir, launch: int, clock: Clock, see: Callable[[float], None]) -> Run:
    """Wait until the leader has started `launch`, and return the run.

    Args:
        see: called every `SAY_S` seconds with the seconds waited, to replace the leader's pod.

    Raises:
        JobError: a later launch has started.
    """
    (run, tail), waited = recall(run_dir), 0.0
    while True:
        try:
            for entry in tail.each():
                run, _ = step(run, entry.event)
        except (OSError, JobError) as exc:  # only the leader decides whether the journal is damaged
            log.warning("failed to read the journal, retrying: %s", exc)
        known = run.job.launch.launch if run.job else 0
        if known == launch:
            return run
        if known > launch:
            raise JobError(f"this pod belongs to launch {launch}, but the newest launch is {known}")
        if waited % SAY_S == 0:
            log.info("waiting for the leader's pod to start launch %s", launch)
            see(waited)
        clock.sleep(WAIT_S)
        waited += WAIT_S


def _see_to_the_leader(
    pod: Pod, handover: Handover, environ: Mapping[str, str], clock: Clock, waited_s: float
) -> None:
    """Replace the leader's pod if it never starts. A running pod is left alone, as it may be slow.

    Pods with a higher rank ask less often, so that a large job sends few requests.
    """
    from orchestrator.backends.kubernetes.backend import KubernetesBackend

    if not waited_s or waited_s % (SAY_S * pod.node_rank):
        return
    try:
        KubernetesBackend(environ, clock).revive_leader(handover.launch, silent_s=None)
    except BackendError as exc:
        log.error("failed to replace the leader, retrying: %s", exc)


def _own(handover: Handover, environ: Mapping[str, str], clock: Clock, same: bool) -> None:
    """Make the job the owner of the objects that `kubectl apply` created, so that deleting the job
    deletes them. `same`: the applied objects match the running launch."""
    from orchestrator.backends.kubernetes.backend import KubernetesBackend
    from orchestrator.backends.kubernetes.render import spec_hash

    runs = spec_hash(handover) if same else ""
    try:
        KubernetesBackend(environ, clock).own(handover.launch, runs)
    except BackendError as exc:
        log.warning("failed to make the job the owner of its objects: %s", exc.message)


def _has_ended(pod: Pod, handover: Handover, run: Run, run_dir: RunDir) -> int:
    """Exit code of a pod that starts after the end, or after its objects were applied again."""
    launch = handover.launch
    log.warning(
        "nothing to run: launch %s of job %s in %s has ended, %s: %s. To resume from its newest"
        " checkpoint: `ndctl submit --resume`; to start over: `ndctl submit --new`",
        *(launch.launch, launch.job, run_dir.path, run.state, run.stage.reason),
    )
    if pod.leads:
        _print_journal(run_dir)
    return exit_codes.FAILED if run.ending == "FAILED" else exit_codes.OK


def _be_agent(pod: Pod, handover: Handover, run_dir: RunDir, environ: Mapping[str, str]) -> int:
    from orchestrator.backends.entry.agent import main as agent

    launch = handover.launch
    argv = [
        f"--run-dir={launch.run_dir}",
        f"--host={pod.host}",
        f"--address={pod.address}",
        f"--launch={launch.launch}",
        f"--devices={launch.devices_per_host}",
        f"--agent-timeout={launch.agent_timeout}",
        "--restarts=0",
        f"--patience={launch.kubernetes_spec.pod_patience}",
        f"--turn={max(pod.node_rank, 1)}",
        *_rendezvous(environ),
        *(["--lead"] if pod.leads else []),
    ]
    rest = {name: value for name, value in environ.items() if not name.startswith(OPERATORS)}
    with LogForwarder(run_dir, pod.host, sys.stdout):
        try:
            code = agent(argv, rest)
        except BackendError as exc:  # the next pod would also lack this permission
            log.critical("the leader cannot start: %s", exc)
            return exit_codes.REFUSED
    if pod.leads:
        _print_journal(run_dir)
    code = _of_the_pod(code, pod, run_dir)
    if pod.leads and code in (exit_codes.OK, exit_codes.FAILED):
        clock = SystemClock()
        await_others(partial(_others_run, handover, environ, clock), clock)
    log.info("exiting with code %s", code)
    return code


def await_others(others_run: Callable[[], int], clock: Clock) -> None:
    """Wait until the other pods have ended. When the leader's pod ends, the operator deletes
    running pods, and their logs are lost."""
    until = clock.monotonic() + OTHERS_END_S
    while True:
        try:
            left = others_run()
        except BackendError as exc:
            log.info("failed to count the other pods: %s", exc)
            return
        if not left:
            return
        if clock.monotonic() >= until:
            log.warning("pods still running %.0f s after the end: %s", OTHERS_END_S, left)
            return
        clock.sleep(WAIT_S)


def _others_run(handover: Handover, environ: Mapping[str, str], clock: Clock) -> int:
    from orchestrator.backends.kubernetes.backend import KubernetesBackend

    return KubernetesBackend(environ, clock).others_run(handover.launch)


def _of_the_pod(code: int, pod: Pod, run_dir: RunDir) -> int:
    """A failed agent does not mean a FAILED job. Only the journal says that."""
    if code == exit_codes.FAILED and not (pod.leads and replay(run_dir).ending == "FAILED"):
        log.critical("the agent of this pod failed, a replacement will retry")
        return exit_codes.LEADER_LOST
    return code


def _rendezvous(environ: Mapping[str, str]) -> list[str]:
    """Use the operator's MASTER_ADDR and MASTER_PORT for the leader. They are meant for torchrun,
    which does not need the port. A TrainJob sets them only with the prefix PET_."""
    host, port = (
        environ.get(name) or environ.get(f"PET_{name}", "")
        for name in ("MASTER_ADDR", "MASTER_PORT")
    )
    return [f"--port={port}", f"--leader-at={host}:{port}"] if host and port.isdigit() else []


def _print_journal(run_dir: RunDir) -> None:
    """Print the journal and the metrics to the pod log, where `ndctl` reads them after the end."""
    for mark, path in ((JOURNAL_MARK, run_dir.journal), (METRICS_MARK, run_dir.metrics)):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        told = data[newest_line(data, MOST_TOLD[mark]) :]
        if mark == METRICS_MARK and told != data:  # views begin with the loss of the first step
            told = data[: data.index(b"\n") + 1] + told
        # As bytes: the encoding of the pod's locale may lack characters of a job's texts, which may
        # also contain some at which splitlines() splits.
        for line in told.split(b"\n")[:-1]:
            sys.stdout.buffer.write(b"%s%s\n" % (mark.encode(), line))
    sys.stdout.flush()


MOST_TOLD = {JOURNAL_MARK: 4 << 20, METRICS_MARK: 1 << 20}
"""Maximum bytes. A node keeps 10 MiB of a pod log, and earlier readers have earlier lines."""


def newest_line(data: bytes, most: int) -> int:
    """Start of the last complete lines that fit in `most` bytes."""
    return 0 if len(data) <= most else data.index(b"\n", len(data) - most - 1) + 1
