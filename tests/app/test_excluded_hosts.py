"""The list of excluded hosts, with the reason, the date and the command that ends it."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator import host_strikes
from orchestrator.app.excluded_hosts import excluded_hosts, excluded_while_queued
from orchestrator.backends.slurm.backend import SlurmBackend
from orchestrator.job.state import Run
from orchestrator.job.transitions import fold
from orchestrator.seams import LaunchStatus
from tests.agent.world import TurnedClock
from tests.backends.slurm.slurm_launch import FakeSlurm
from tests.job.job_driver import Job
from tests.jobs_on_disk import NoCluster, cluster, events, submission

__all__ = ["cluster"]
AT = 1_700_000_000.0


def slurm(**environ: str) -> SlurmBackend:
    return SlurmBackend(environ, TurnedClock(), FakeSlurm())


TB = slurm(SLURM_CLUSTER_NAME="tb")


@pytest.fixture
def clock() -> TurnedClock:
    return TurnedClock(AT)


def hosts_to_exclude(root: Path, host: str = "node4", cluster: str = "tb") -> None:
    for attempt in (1, 2):
        host_strikes.record(
            host_strikes.path_of(root, cluster),
            host_strikes.Strike(
                at=AT - 60, host=host, job="llama", attempt=attempt, kind="host-lost", cause="mute"
            ),
        )


def said(root: Path, clock: TurnedClock, **environ: str) -> list[str]:
    return [str(one) for one in excluded_hosts(root, TB, environ, clock)]


def test_a_host_with_strikes_is_listed_with_date_and_command(
    tmp_path: Path, clock: TurnedClock
) -> None:
    hosts_to_exclude(tmp_path)
    (line,) = said(tmp_path, clock, NDCTL_RUN_ROOT=str(tmp_path))
    assert line.startswith("node4 is excluded (until 2023-11-16 ")
    assert line.endswith(
        ": 2 strikes, last host-lost in llama: mute); to use it: ndctl hosts clear node4"
    )


def test_the_command_names_the_run_root_and_the_cluster(tmp_path: Path, clock: TurnedClock) -> None:
    hosts_to_exclude(tmp_path)
    hosts_to_exclude(tmp_path, cluster="other")
    (line,) = said(tmp_path, clock)
    undo = f"ndctl hosts --run-root {tmp_path} clear node4 --cluster tb"
    assert line.endswith(f"; to use it: {undo}")


def test_for_a_pinned_host_the_command_unpins_it(tmp_path: Path, clock: TurnedClock) -> None:
    pin = host_strikes.Pinned(at=AT, host="node2", use="never", by="ann", reason="burnt")
    host_strikes.record(host_strikes.path_of(tmp_path, "tb"), pin)
    (line,) = said(tmp_path, clock, NDCTL_RUN_ROOT=str(tmp_path))
    assert line.startswith("node2 is excluded (pinned: never used, by ann since 2023-11-14")
    assert line.endswith(": burnt); to use it: ndctl hosts unpin node2")


def test_without_a_file_of_strikes_no_scheduler_is_asked(
    tmp_path: Path, clock: TurnedClock
) -> None:
    backend = slurm()
    assert excluded_hosts(tmp_path, backend, {}, clock) == ()
    assert isinstance(backend.shell, FakeSlurm)
    assert backend.shell.calls == []


def a_run(root: Path, exclude: Mapping[str, str]) -> Run:
    from orchestrator.app.submission import submit_job

    submit_job.submit(submission(root), {}, TurnedClock())
    run = fold(events(root))
    return replace(run, hosts=replace(run.hosts, exclude=exclude))


def test_each_excluded_host_has_the_command_that_allows_it(
    cluster: NoCluster, tmp_path: Path, clock: TurnedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forgetting the strikes alone does not change the request to Slurm."""
    run = a_run(tmp_path, exclude={"node3": "it said nothing for 10 s"})
    monkeypatch.setattr("orchestrator.backends.by_name.implementation_named", lambda *_: TB)
    hosts_to_exclude(tmp_path)
    update = "scontrol update JobId=12 ExcNodeList="
    seen = LaunchStatus(
        "Slurm job 12 is PENDING",
        held=True,
        excluded={"node2": f"{update}node[3-4]", "node3": f"{update}x", "node4": f"{update}y"},
    )
    found = excluded_while_queued(run, seen, {"NDCTL_RUN_ROOT": str(tmp_path)}, clock)
    assert found["node2"] == (
        "is excluded by this job (there is no longer a reason to exclude it); to use it:"
        f" {update}node[3-4]"
    )
    assert found["node3"] == (
        f"is excluded by this job (it said nothing for 10 s); to use it: {update}x"
    )
    assert found["node4"].startswith("is excluded (until 2023-11-16")
    assert found["node4"].endswith(f"; to use it: ndctl hosts clear node4 && {update}y")
    assert excluded_while_queued(run, LaunchStatus(None, held=False), {}, clock) == {}


def said_of(run: Run, host: str) -> str:
    seen = LaunchStatus("Slurm job 12 is PENDING", held=True, excluded={host: "scontrol update"})
    return excluded_while_queued(run, seen, {}, TurnedClock())[host]


def test_the_incident_that_excluded_a_host_is_named(
    cluster: NoCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.backends.by_name.implementation_named", lambda *_: TB)
    job = Job().granted().running()
    job.loses("host-1")
    job.stops("host-0")
    job.waits(60)
    assert said_of(job.run, "host-1").startswith(
        "is excluded by this job (incident #1 host-lost: its agent was gone when the job was queued"
    )


def test_a_leader_that_could_not_write_is_reported_with_its_host(
    cluster: NoCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.backends.by_name.implementation_named", lambda *_: TB)
    run = Job().granted().running().run
    assert "its leader was lost, and the agents requested" in said_of(run, "host-0")
    assert "no longer a reason to exclude it" in said_of(run, "host-1")
