"""Which incidents become strikes of a host, for later jobs."""

from pathlib import Path

from msgspec.structs import replace

from orchestrator import host_strikes
from orchestrator.contract.messages.events import EvidenceGathered
from orchestrator.diagnosis.cause.verdict import Culprit, Evidence
from orchestrator.host_strikes import Strike
from orchestrator.job.incident import Incident
from orchestrator.leader.records.strike_writer import new_lines, record
from tests.job.job_driver import Job


def an_incident(kind: str, host: str | None, signal: str | None = None) -> Incident:
    return Incident(
        at=1_700_000_000.0,
        attempt=2,
        kind=kind,
        cause="a cause",
        culprit=Culprit(host=host),
        evidence=Evidence(signal=signal),
        id=1,
        step=3,
        detected_after_s=0.1,
        action="an action",
    )


def test_only_incidents_whose_culprit_is_a_host_are_strikes_and_only_once() -> None:
    before = Job().running().run
    after = replace(
        before,
        history=replace(
            before.history,
            incidents=(
                an_incident("host-lost", "host-1"),
                an_incident("rank-killed", "host-0", "SIGKILL"),
                an_incident("rank-killed", "host-0", "SIGTERM"),
                an_incident("host-lost", None),
                replace(an_incident("host-lost", "host-1"), drill="kill:host=1@step=2"),
            ),
        ),
    )
    found = [one for one in new_lines(before, after) if isinstance(one, Strike)]
    assert [(one.host, one.kind) for one in found] == [
        ("host-1", "host-lost"),
        ("host-0", "rank-killed"),
    ]
    assert {one.job for one in found} == {before.job.launch.job if before.job else ""}
    assert {one.submitted for one in found} == {before.job.at if before.job else 0.0}
    assert new_lines(after, after) == []


def kernel_logs(job: Job, line: str) -> None:
    evidence = EvidenceGathered(
        at=job.now(), attempt=1, host="host-1", ranks=(), kernel=(line,), unasked=True
    )
    job.tell(evidence)


def test_a_broken_gpu_is_a_strike_whether_its_rank_raised_or_aborted() -> None:
    raising, aborting = (Job(spares=1).running() for _ in range(2))
    raising.raises(2, "CUDA error: uncorrectable ECC error encountered")
    aborting.exits(2, signal=6)
    kernel_logs(aborting, "[51.0] NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.")
    for job in (raising, aborting):
        before = job.run
        job.stops()
        (strike,) = new_lines(before, job.run)
        assert strike.host == "host-1"


def test_a_rank_killed_for_memory_is_no_strike_of_its_host() -> None:
    job = Job().running()
    before = job.run
    job.exits(2)
    kernel_logs(job, "[51.0] Memory cgroup out of memory: Killed process 7 (python)")
    job.stops()
    assert new_lines(before, job.run) == []


def test_a_failed_write_of_a_strike_raises_nothing(tmp_path: Path) -> None:
    before = Job().running().run
    (strike,) = new_lines(
        before,
        replace(
            before, history=replace(before.history, incidents=(an_incident("host-lost", "a"),))
        ),
    )
    path = host_strikes.path_of(tmp_path, "tb")
    record(path, strike)
    assert [one for one in host_strikes.recall(path) if isinstance(one, Strike)] == [strike]
    path.unlink()
    path.mkdir()
    record(path, strike)
