"""Hosts over jobs: strikes and pins, jobs that use a host now, incidents of all jobs."""

from datetime import UTC

import pytest
from msgspec.structs import replace

from orchestrator.dashboard import format
from orchestrator.dashboard.fleet.host_table import (
    HostUse,
    host_json,
    host_lines,
    host_text,
    host_uses,
)
from orchestrator.dashboard.fleet.summary import summary_of
from orchestrator.host_strikes import Pinned, Record, Strike
from orchestrator.seams import LaunchStatus
from tests.dashboard.dashboard_story import START, finished, metrics, recovered
from tests.dashboard.fleet.table_text import text_of
from tests.dashboard.fleet.test_table import row
from tests.dashboard.test_status import snapshot

NOW = START + 3600
STRUCK = Record(
    host="host-0",
    strikes=(
        Strike(
            at=START, host="host-0", job="old", attempt=1, kind="host-lost", cause="it was silent"
        ),
    ),
    excluded_until=START + 86_400,
    score=1.5,
)
PINNED = Record(
    host="node9",
    strikes=(),
    excluded_until=None,
    pin=Pinned(at=START, host="node9", use="never", by="alice", reason="burnt connector"),
)
RUNS = summary_of(snapshot(recovered(), metrics(1, 30)))
"""It runs on host-0 and host-1, after an incident on host-0."""


def uses(backend: str = "slurm") -> dict[str, HostUse]:
    job = row(replace(RUNS, backend=backend), "llama", backend=backend)
    other = row(replace(RUNS, backend=backend), "qwen", backend=backend, user="bob")
    return {one.host: one for one in host_uses({"gpu": (STRUCK, PINNED)}, [job, other])}


def test_a_host_joins_its_strikes_its_jobs_and_their_incidents() -> None:
    found = uses()
    assert list(found) == ["node9", "host-0", "host-1"]  # not used, excluded, allowed
    assert found["host-0"].cluster == "gpu"
    assert [job.name for job in found["host-0"].jobs] == ["llama", "qwen"]
    assert [one.job for one in found["host-0"].incidents] == ["llama", "qwen"]
    assert found["host-1"].incidents == ()
    # The only recorded cluster must be the cluster of the other host, too.
    assert found["host-1"].cluster == "gpu"
    body = host_json(found["host-0"])
    assert (body["use"], body["excluded"], len(body["strikes"])) == ("excluded", True, 1)
    assert body["jobs"][1] == {"name": "qwen", "user": "bob", "state": "RUNNING"}
    assert {"at", "job", "user", "attempt", "kind", "drill"} == set(body["incidents"][0])
    assert host_json(found["host-1"])["use"] == "allowed"


def test_hosts_of_local_jobs_are_not_the_hosts_of_a_cluster() -> None:
    found = host_uses({"gpu": (STRUCK,)}, [row(replace(RUNS, backend="local"))])
    assert sorted((one.cluster, one.host) for one in found) == [
        ("gpu", "host-0"),
        ("local", "host-0"),
        ("local", "host-1"),
    ]


@pytest.mark.parametrize(
    ("struck", "clusters"),
    [("node1", ("gpu", "kubernetes")), ("elsewhere", ("slurm", "kubernetes"))],
)
def test_the_only_cluster_has_no_hosts_of_another_backend(
    struck: str, clusters: tuple[str, str]
) -> None:
    """Without a job on a recorded host, it is not known whose cluster that is."""
    here = replace(RUNS, backend="slurm", placement=("node1", "node2"), incidents=())
    there = replace(RUNS, backend="kubernetes", placement=("pod-0",), incidents=())
    rows = [row(here, backend="slurm"), row(there, backend="kubernetes")]
    found = {
        one.host: one.cluster for one in host_uses({"gpu": (replace(STRUCK, host=struck),)}, rows)
    }
    assert (found["node2"], found["pod-0"]) == clusters


def test_a_job_that_ended_uses_no_host_but_keeps_its_incidents() -> None:
    done = summary_of(snapshot(finished(), metrics(1, 60)))
    hosts = host_uses({}, [row(replace(done, backend="slurm"), backend="slurm")])
    assert all(not one.jobs for one in hosts)
    assert sum(len(one.incidents) for one in hosts) == len(done.incidents)


def test_a_queued_job_uses_no_host() -> None:
    held = LaunchStatus("Slurm job 12 is PENDING", held=True)
    waits = summary_of(replace(snapshot(recovered(), alive=False), launch_status=held))
    assert (waits.state, waits.placement, waits.hosts) == ("PENDING", (), 2)


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_the_table_fits_the_terminal(width: int) -> None:
    lines = text_of(host_lines(list(uses().values()), NOW, width)).splitlines()
    assert all(format.cells(line) <= width for line in lines)
    assert lines[0].split()[:2] in (["HOST", "USE"], ["HOST", "CLUSTER"])


def test_the_table_says_why_a_host_is_not_used() -> None:
    text = text_of(host_lines(list(uses().values()), NOW, None))
    assert "pinned: never used, by alice" in text
    assert "excluded until" in text
    assert "llama (alice), qwen (bob)" in text
    assert " ago" in text


def test_all_about_a_host_has_evidence_jobs_and_history() -> None:
    text = host_text(uses()["host-0"], UTC)
    assert "host-lost in old, attempt 1: it was silent" in text
    assert "used by llama of alice: RUNNING" in text
    assert "2 incidents in the jobs known here:" in text
    assert "2023-11-14" in text
    assert host_text(uses()["host-1"], UTC).startswith("gpu/host-1  no strikes\n  used by llama")
