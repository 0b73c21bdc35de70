"""Start of a pod: its rank, its leader, and its end when it is deleted."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.backends.entry import pod_agent
from orchestrator.backends.entry.pod_agent import (
    OTHERS_END_S,
    Pod,
    await_launch,
    await_others,
    hear_late,
    newest_line,
    run,
)
from orchestrator.backends.kubernetes.api.client import Listed
from orchestrator.backends.kubernetes.backend import KubernetesBackend
from orchestrator.backends.kubernetes.resources import PODS, Resource
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.messages.events import CancelRequested, LeaderStarted
from orchestrator.contract.submission_payload import files_of
from orchestrator.errors import BackendError, JobError
from orchestrator.journal.journal import Journal
from orchestrator.journal.run_dir_init import begin
from orchestrator.journal.supervisor import Supervisor
from tests.agent.world import TurnedClock
from tests.backends.handover import handover_of
from tests.backends.kubernetes.rendered import PLAIN, a_launch

NODE_ENVIRON = {"NDCTL_NODE_NAME": "node-3", "NDCTL_POD_IP": "10.1.2.3"}


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({"RANK": "2", "PET_NODE_RANK": "2"}, 2),
        ({"PET_NODE_RANK": "1"}, 1),
        ({"JOB_COMPLETION_INDEX": "0"}, 0),
        ({"JOB_COMPLETION_INDEX": "3", "RANK": "0"}, 3),
        ({"JOB_COMPLETION_INDEX": "", "RANK": "4"}, 4),
    ],
)
def test_a_pod_reads_its_rank_from_the_variables_of_the_operator(
    environ: dict[str, str], rank: int
) -> None:
    pod = Pod.from_mapping({**NODE_ENVIRON, **environ})
    assert (pod.node_rank, pod.leads) == (rank, rank == 0)
    assert (pod.host, pod.address) == ("node-3", "10.1.2.3")
    assert pod.folder == Path("/etc/ndctl/submission")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        NODE_ENVIRON,
        {**NODE_ENVIRON, "RANK": "first"},
        {"RANK": "0", "NDCTL_NODE_NAME": "n"},
        {**NODE_ENVIRON, "RANK": "0", "NDCTL_SUBMISSION": "/nowhere"},
    ],
)
def test_a_process_outside_a_pod_of_a_job_is_refused(environ: dict[str, str]) -> None:
    assert run(environ) == exit_codes.REFUSED


def test_followers_wait_until_the_leader_has_begun_their_launch(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "job")
    launch = replace(a_launch(PLAIN), run_dir=str(run_dir.path))

    class BeginsOnSleep(TurnedClock):
        def sleep(self, seconds: float) -> None:
            self.time += seconds
            begin(run_dir, handover_of(launch), self, token=False)

    begun = await_launch(run_dir, 1, BeginsOnSleep(), lambda waited_s: None)
    assert begun.job is not None
    assert begun.job.launch.launch == 1
    begin(run_dir, handover_of(replace(launch, launch=4), resume=True), TurnedClock(), token=False)
    with pytest.raises(JobError, match="the newest launch is 4"):
        await_launch(run_dir, 1, TurnedClock(), lambda waited_s: None)


def test_waiting_pods_with_a_higher_rank_ask_for_the_leader_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """512 pods that wait for an hour must not send a storm of requests."""
    asked: list[str] = []

    def revive(self: KubernetesBackend, launch: LaunchPlan, *, silent_s: float | None) -> None:
        assert silent_s is None, "no pod has heard the leader yet"
        asked.append(launch.job)
        raise BackendError("it may not")

    monkeypatch.setattr(KubernetesBackend, "revive_leader", revive)
    handover = handover_of(a_launch(PLAIN))
    counts = {}
    for rank in (1, 2, 511):
        pod = Pod(host="node", address="::1", node_rank=rank, folder=tmp_path)
        asked.clear()
        for waited_s in range(0, 3601, 30):
            pod_agent._see_to_the_leader(pod, handover, {}, TurnedClock(), float(waited_s))
        counts[rank] = len(asked)
    assert counts == {1: 120, 2: 60, 511: 0}


def pod_of(tmp_path: Path) -> tuple[RunDir, dict[str, str]]:
    """Run directory of a job, and the environment of the leader's pod with its mounted files."""
    run_dir, folder = RunDir(tmp_path / "job"), tmp_path / "submission"
    folder.mkdir(exist_ok=True)
    launch = replace(a_launch(PLAIN, hosts=1), run_dir=str(run_dir.path))
    for name, text in files_of(handover_of(launch, backend="kubernetes")).items():
        (folder / name).write_text(text)
    return run_dir, {**NODE_ENVIRON, "RANK": "0", "NDCTL_SUBMISSION": str(folder)}


def test_a_pod_applied_after_the_end_logs_the_journal_and_exits(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pod_agent, "_own", lambda *_: None)
    run_dir, environ = pod_of(tmp_path)
    launch = replace(a_launch(PLAIN, hosts=1), run_dir=str(run_dir.path))
    begin(run_dir, handover_of(launch), TurnedClock(), token=False)
    with Journal(run_dir.journal, TurnedClock()) as journal:
        supervisor = Supervisor(journal)
        supervisor.feed(LeaderStarted(at=1.0, host="node-0", pid=1))
        supervisor.feed(CancelRequested(at=2.0, by="me"))
    assert run(environ) == exit_codes.OK
    assert "nothing to run: launch 1 of job job in" in caplog.text
    assert "--resume" in caplog.text
    expected = capsys.readouterr().out.splitlines()
    journal_lines = run_dir.journal.read_text().splitlines()
    assert expected == [f"ndctl-journal: {line}" for line in journal_lines]


def test_an_old_manifest_fails_the_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir, environ = pod_of(tmp_path)
    launch = replace(a_launch(PLAIN, hosts=1), run_dir=str(run_dir.path), launch=5)
    begin(run_dir, handover_of(launch), TurnedClock(), token=False)
    assert run(environ) == exit_codes.FAILED
    assert "an old manifest was applied" in caplog.text


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}, "--leader-at=job-master-0:23456"),
        (
            {"PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29400"},
            "--leader-at=job-node-0-0.job:29400",
        ),
        ({"MASTER_ADDR": "job-master-0", "MASTER_PORT": "tcp://10.0.0.1"}, ""),
        ({"MASTER_PORT": "23456"}, ""),
    ],
)
def test_the_rendezvous_address_of_the_operator_is_passed_to_the_agent(
    environ: dict[str, str], expected: str
) -> None:
    assert pod_agent._rendezvous(environ)[1:] == ([expected] if expected else [])


def test_newest_line_cuts_a_journal_at_a_whole_line() -> None:
    data = b"one\ntwo\nthree\n"
    assert [data[newest_line(data, most) :] for most in (0, 5, 6, 9, 10, 13, 14)] == [
        b"",
        b"",
        b"three\n",
        b"three\n",
        b"two\nthree\n",
        b"two\nthree\n",
        data,
    ]


def test_the_sigterm_handler_is_set_before_slow_imports() -> None:
    """On a cold node, imports of ndctl take seconds, so the handler is set before them."""
    script = """
import runpy, signal, sys
def asked(number, handler):
    ours = {name for name in sys.modules if name.startswith("orchestrator")}
    print(number.name, sorted(ours), handler.__module__)
    sys.exit()
signal.signal = asked
runpy.run_module("orchestrator.backends.entry.pod_start", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True
    )
    packages = ["orchestrator", "orchestrator.backends", "orchestrator.backends.entry"]
    assert done.stdout == f"SIGTERM {packages} __main__\n"


POD_ENVIRON = {**NODE_ENVIRON, "NDCTL_POD_NAME": "job-worker-0", "NDCTL_POD_UID": "uid-1"}


def a_pod(uid: str = "uid-1", **more: str) -> dict[str, Any]:
    return {"metadata": {"name": "job-worker-0", "uid": uid, **more}}


@pytest.mark.parametrize(
    ("pod", "is_leaving"),
    [
        (a_pod(), False),
        (a_pod(deletionTimestamp="2026-01-01T00:00:00Z"), True),
        (a_pod("uid-2"), True),
        (None, True),
    ],
)
def test_a_pod_is_leaving_if_its_own_object_is_deleted_or_replaced(
    pod: Any, is_leaving: bool
) -> None:
    class Cluster:
        def get(self, resource: Resource, namespace: str, name: str) -> Any:
            assert (resource, namespace, name) == (PODS, "team", "job-worker-0")
            return pod

    backend = KubernetesBackend({**POD_ENVIRON, "NDCTL_POD_NAMESPACE": "team"}, TurnedClock())
    backend.apis[None] = Cluster()  # type: ignore[assignment]
    assert backend.is_leaving(a_launch(PLAIN)) == is_leaving
    assert not KubernetesBackend({}, TurnedClock()).is_leaving(a_launch(PLAIN))


def test_other_pods_of_the_job_are_counted_while_they_run() -> None:
    def named(name: str, phase: str = "Running", **more: str) -> dict[str, Any]:
        return {"metadata": {"name": name, **more}, "status": {"phase": phase}}

    class Cluster:
        def list(self, resource: Resource, namespace: str, *, labels: str) -> Listed:
            pods = [named("job-worker-0"), named("a"), named("b"), named("c", "Succeeded")]
            pods += [named("d", "Pending"), named("e", deletionTimestamp="2026-01-01T00:00:00Z")]
            return Listed(items=tuple(pods), version="1")

    backend = KubernetesBackend({**POD_ENVIRON, "NDCTL_POD_NAMESPACE": "team"}, TurnedClock())
    backend.apis[None] = Cluster()  # type: ignore[assignment]
    assert backend.others_run(a_launch(PLAIN)) == 2


def test_the_leaders_pod_ends_after_the_others_but_does_not_wait_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, counts = TurnedClock(), iter([2, 1, 0])
    await_others(lambda: next(counts), clock)
    assert list(counts) == []

    begun = clock.monotonic()
    await_others(lambda: 3, clock)
    assert OTHERS_END_S <= clock.monotonic() - begun < OTHERS_END_S + 2
    assert "pods still running 30 s after the end: 3" in caplog.text

    def fail() -> int:
        raise BackendError("the API server cannot be reached")

    begun = clock.monotonic()
    await_others(fail, clock)
    assert clock.monotonic() == begun


def test_a_pod_that_was_deleted_before_its_signal_handler_leaves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The kernel drops signals to the first process of a container that has no handler yet."""
    left: list[str] = []

    def fail() -> bool:
        raise BackendError("the API server cannot be reached")

    for is_leaving in (lambda: False, fail, lambda: True):
        hear_late(is_leaving, lambda: left.append("left")).join(30.0)
    assert left == ["left"]
    assert "deleted before its process handled signals" in caplog.text
