"""`SlurmBackend` with a fake Slurm, which gives the answers that were captured from a real one."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator import host_strikes
from orchestrator.app.submission.submit_job import hosts_to_exclude as left_out_at_submission
from orchestrator.backends.slurm import render
from orchestrator.backends.slurm.backend import SlurmBackend
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.slurm_spec import SlurmSpec
from orchestrator.errors import BackendError, Ended, Refused, Unanswered
from orchestrator.seams import Completed
from tests.agent.world import TurnedClock
from tests.backends.handover import handover_of
from tests.backends.slurm.slurm_launch import DOWN, LATER, FakeJob, FakeSlurm, a_launch


def nodes(count: int) -> dict[str, str]:
    return {f"node{number}": "IDLE" for number in range(1, count + 1)}


ENVIRON = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node[1-2]"}


def submitted(slurm: FakeSlurm, run_dir: Path) -> tuple[SlurmBackend, LaunchPlan, FakeJob]:
    backend, launch = SlurmBackend(ENVIRON, TurnedClock(), slurm), a_launch(run_dir)
    backend.submit(handover_of(launch))
    (job,) = slurm.jobs.values()
    slurm.calls.clear()
    return backend, launch, job


def test_the_described_script_is_submitted_and_its_job_recorded(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    backend, launch = SlurmBackend(ENVIRON, TurnedClock(), slurm), a_launch(tmp_path)
    backend.submit(handover_of(launch))
    (job,) = slurm.jobs.values()
    assert render.script_path(launch).read_text() == backend.describe(handover_of(launch))
    assert slurm.calls == [
        [
            *("sbatch", "--parsable", f"--output={tmp_path}/slurm/launch-1/%j_batch.out"),
            str(render.script_path(launch)),
        ]
    ]
    assert json.loads((tmp_path / "slurm" / "launch-1.json").read_text()) == {"job_id": job.id}
    assert backend.name_of(launch) == "Slurm job 1"


def test_an_answer_that_is_lost_never_makes_a_second_job(tmp_path: Path) -> None:
    def lose_answer(argv: list[str], before: int) -> Completed | None:
        if argv[0] != "sbatch":
            return None
        slurm.queue(argv[-1])
        raise TimeoutError("sbatch did not end within 30 s")

    slurm = FakeSlurm(intercept=lose_answer)
    backend, launch = SlurmBackend({}, TurnedClock(), slurm), a_launch(tmp_path)
    backend.submit(handover_of(launch))
    backend.submit(handover_of(launch))
    assert len(slurm.jobs) == 1
    assert backend.name_of(launch) == "Slurm job 1"


def test_a_slow_slurmctld_makes_no_second_job(tmp_path: Path) -> None:
    """slurmctld accepts the job after sbatch has timed out."""

    def queue_later(argv: list[str], before: int) -> Completed | None:
        if argv[0] == "sbatch":
            sent.append(argv[-1])
            raise TimeoutError("sbatch did not end within 30 s")
        if len(slurm.calls) > 6 and not slurm.jobs:
            slurm.queue(sent[0])
        return None

    sent: list[str] = []
    slurm = FakeSlurm(intercept=queue_later)
    backend, launch = SlurmBackend({}, TurnedClock(), slurm), a_launch(tmp_path)
    backend.submit(handover_of(launch))
    assert (len(sent), len(slurm.jobs)) == (1, 1)
    assert backend.name_of(launch) == "Slurm job 1"


@pytest.mark.parametrize("stays_down", [True, False])
def test_a_job_that_slurm_may_have_is_not_submitted_again_automatically(
    tmp_path: Path, stays_down: bool
) -> None:
    def lose_answer(argv: list[str], before: int) -> Completed | None:
        if argv[0] == "sbatch":
            sent.append(argv[-1])
        return DOWN if sent and (stays_down or argv[0] == "sbatch") else None

    sent: list[str] = []
    slurm = FakeSlurm(intercept=lose_answer)
    backend, launch = SlurmBackend({}, TurnedClock(), slurm), a_launch(tmp_path)
    with pytest.raises(Unanswered, match="it is unknown whether Slurm accepted job") as failed:
        backend.submit(handover_of(launch))
    assert "--resume" in failed.value.fix
    assert len(sent) == 1
    slurm.intercept = lambda argv, before: None
    slurm.queue(sent[0])
    assert backend.standing(launch) == "Slurm job 1 is RUNNING", (
        "a later submission must find the job"
    )


def test_cancel_ends_all_jobs_of_a_launch(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    backend, launch, _ = submitted(slurm, tmp_path)
    slurm.queue(str(render.script_path(launch)))
    backend.clear(launch)
    assert [job.state for job in slurm.jobs.values()] == ["CANCELLED", "CANCELLED"]
    assert slurm.count("scancel") == 2


def test_only_one_of_two_jobs_of_a_launch_counts(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    first, launch, job = submitted(slurm, tmp_path)
    slurm.queue(str(render.script_path(launch)))
    second = SlurmBackend({**ENVIRON, "SLURM_JOB_ID": "2"}, TurnedClock(), slurm)
    assert first.rival(launch) is None
    assert second.rival(launch) == "Slurm job 1 is RUNNING"
    job.state = "FAILED"
    assert second.rival(launch) is None
    assert second.name_of(launch) == "Slurm job 2"


def test_if_sbatch_was_never_answered_the_first_running_job_counts(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    first, launch, _ = submitted(slurm, tmp_path)
    slurm.queue(str(render.script_path(launch)))
    (tmp_path / "slurm" / "launch-1.json").unlink()
    second = SlurmBackend({**ENVIRON, "SLURM_JOB_ID": "2"}, TurnedClock(), slurm)
    assert second.rival(launch) is None
    assert first.rival(launch) == "Slurm job 2 is RUNNING"
    assert {path.name for path in (tmp_path / "slurm").iterdir()} == {"launch-1", "launch-1.json"}


def test_without_a_record_the_job_is_found_by_its_comment(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    backend, launch, job = submitted(slurm, tmp_path)
    (tmp_path / "slurm" / "launch-1.json").unlink()
    job.command = "/var/spool/slurm/job00001/slurm_script"
    assert backend.standing(launch) == "Slurm job 1 is RUNNING"
    assert backend.name_of(launch) == "Slurm job 1"


def test_one_empty_answer_of_the_queue_is_not_trusted(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    backend, launch, _ = submitted(slurm, tmp_path)
    (tmp_path / "slurm" / "launch-1.json").unlink()
    slurm.intercept = lambda argv, before: Completed(0, "", "") if before == 0 else None
    assert backend.standing(launch) == "Slurm job 1 is RUNNING"


def test_a_job_of_another_cluster_with_the_same_number_is_not_ours(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    backend, launch, job = submitted(slurm, tmp_path)
    job.command, job.comment = "/home/other.sh", "(null)"
    assert backend.standing(launch) is None
    backend.clear(launch)
    assert slurm.count("scancel") == 0


def test_a_slurmctld_that_is_down_never_means_that_the_job_is_gone(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    backend, launch, _ = submitted(slurm, tmp_path)
    slurm.intercept = lambda argv, before: DOWN
    with pytest.raises(BackendError, match="does not answer") as failed:
        backend.standing(launch)
    assert "scontrol ping" in failed.value.fix
    assert len(slurm.calls) == 3


def test_calls_wait_for_a_restart_of_slurmctld(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    backend, launch, _ = submitted(slurm, tmp_path)
    slurm.intercept = lambda argv, before: DOWN if before < 2 else None
    assert backend.standing(launch) == "Slurm job 1 is RUNNING"


def test_without_slurm_the_missing_program_is_named() -> None:
    missing = FakeSlurm(intercept=lambda argv, before: Completed(127, "", "no such file"))
    with pytest.raises(BackendError, match="there is no Slurm here: scontrol cannot be run"):
        SlurmBackend({}, TurnedClock(), missing).check(handover_of(a_launch()))


def test_all_problems_of_a_submission_are_reported_at_once(tmp_path: Path) -> None:
    spec = SlurmSpec(time="2:00:00")
    launch = replace(a_launch(tmp_path, 3, spec), devices_per_host=8)
    with pytest.raises(BackendError) as failed:
        SlurmBackend({}, TurnedClock(), FakeSlurm()).check(handover_of(launch))
    assert "cluster.slurm.time: must be at most 1:00:00" in failed.value.message
    assert "cluster.gpus_per_host: must be at most 2" in failed.value.message


def test_a_check_shows_the_answer_of_sbatch_test_only(tmp_path: Path) -> None:
    said, *_ = SlurmBackend({}, TurnedClock(), FakeSlurm()).check(handover_of(a_launch(tmp_path)))
    assert (said.what, said.verdict) == ("sbatch --test-only", "ok")
    assert said.found.startswith("sbatch: Job 9 to start at noon")


def slurm_that_refuses(said: str, option: str) -> FakeSlurm:
    """A fake Slurm that refuses sbatch with `option`."""

    def intercept(argv: list[str], before: int) -> Completed | None:
        return Completed(1, "", said) if argv[:2] == ["sbatch", option] else None

    return FakeSlurm(intercept=intercept)


@pytest.mark.parametrize(
    "said",
    [
        "allocation failure: Invalid account or account/partition combination specified\n",
        "allocation failure: Invalid qos specification\n",
        "allocation failure: Job violates accounting/QOS policy (job submit limit, user's size"
        " and/or time limits)\n",
        "allocation failure: Requested time limit is invalid (missing or exceeds some limit)\n",
        "allocation failure: User's group not permitted to use this partition\n",
        "sbatch: fatal: --segment=3 does not fit the job size (4)\n",  # 26.05
        "sbatch: unrecognized option '--segment=2'\n",  # 22.05
    ],
)
def test_a_job_that_sbatch_would_refuse_is_refused_before_anything_is_written(
    tmp_path: Path, said: str
) -> None:
    backend = SlurmBackend({}, TurnedClock(), slurm_that_refuses(said, "--test-only"))
    with pytest.raises(BackendError, match="Slurm would refuse this job") as failed:
        backend.check(handover_of(a_launch(tmp_path)))
    assert said.strip() in failed.value.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "said",
    [
        "allocation failure: Requested node configuration is not available\n",  # 22.05 queues it
        "allocation failure: Requested partition configuration not available now\n",
        "allocation failure: Requested nodes are busy\n",
        "allocation failure: Invalid time specified\n",  # for a reservation that starts later
    ],
)
def test_a_reason_to_wait_in_the_queue_is_only_a_warning(
    tmp_path: Path, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    slurm = slurm_that_refuses(said, "--test-only")
    slurm.nodes["node2"] = "IDLE+DRAIN"
    (told,) = SlurmBackend({}, TurnedClock(), slurm).check(handover_of(a_launch(tmp_path)))
    assert (told.verdict, told.found) == ("ok", said.strip())
    waits = "the job may wait for nodes that are down, drained or reserved: node2 (bad fan)"
    assert f"{waits}; sbatch --test-only: {said.strip()}" in caplog.text


def test_a_request_that_no_nodes_can_ever_meet_is_refused(tmp_path: Path) -> None:
    """Slurm would keep the job in the queue forever, with the reason PartitionConfig."""
    said = "allocation failure: Requested node configuration is not available\n"
    backend = SlurmBackend({}, TurnedClock(), slurm_that_refuses(said, "--test-only"))
    with pytest.raises(BackendError, match="Slurm would refuse this job: allocation failure"):
        backend.check(handover_of(a_launch(tmp_path)))


def test_a_job_that_sbatch_refuses_is_reported_as_not_queued(tmp_path: Path) -> None:
    said = "sbatch: error: Memory specification can not be satisfied\n"
    backend = SlurmBackend({}, TurnedClock(), slurm_that_refuses(said, "--parsable"))
    with pytest.raises(Refused, match="Memory specification can not be satisfied") as failed:
        backend.submit(handover_of(a_launch(tmp_path)))
    assert "submit the job again; nothing was queued" in failed.value.fix


def test_a_job_is_kept_if_its_number_cannot_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A queued job needs its run directory."""

    def fail_to_record(launch: LaunchPlan, job_id: str) -> None:
        raise OSError(28, "No space left on device")

    slurm, launch = FakeSlurm(), a_launch(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("orchestrator.backends.slurm.job_lookup.record", fail_to_record)
        SlurmBackend({}, TurnedClock(), slurm).submit(handover_of(launch))
    assert "failed to write the id of queued Slurm job 1" in caplog.text
    assert SlurmBackend({}, TurnedClock(), slurm).standing(launch) == "Slurm job 1 is RUNNING"


def test_ignored_sbatch_options_in_the_environment_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shell = {"SBATCH_ACCOUNT": "ml", "SLURM_MPI_TYPE": "pmix", "SLURM_HINT": "x", "SLURM_CONF": ""}
    for environ in (shell, {**shell, "SLURM_JOB_ID": "7"}):  # there Slurm sets some itself
        SlurmBackend(environ, TurnedClock(), FakeSlurm()).check(handover_of(a_launch(tmp_path)))
    ignored = "set cluster.slurm instead: SBATCH_ACCOUNT"
    outside, inside = (line for line in caplog.messages if ignored in line)
    assert outside.endswith(f"{ignored}, SLURM_HINT, SLURM_MPI_TYPE")
    assert inside.endswith(ignored)


@pytest.mark.parametrize(
    ("notice_s", "stop_grace", "warned"),
    [
        (90.0, 30.0, ""),
        (90.0, 120.0, "ranks have 45 s for a checkpoint, less than"),
        (60.0, 30.0, "set notice_s to 75 or more"),
    ],
)
def test_a_grace_longer_than_the_notice_is_reported_before_submission(
    tmp_path: Path,
    notice_s: float,
    stop_grace: float,
    warned: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    launch = replace(a_launch(tmp_path), slurm=SlurmSpec(notice_s=notice_s))
    SlurmBackend({}, TurnedClock(), FakeSlurm()).check(handover_of(launch, stop_grace=stop_grace))
    assert warned in caplog.text
    assert bool(caplog.records) == bool(warned)


def test_the_allocation_is_read_from_the_environment_and_the_switches_from_slurm(
    tmp_path: Path,
) -> None:
    backend, launch, _ = submitted(FakeSlurm(), tmp_path)
    granted = backend.allocation(launch)
    assert granted is not None
    assert (granted.id, granted.restarts, granted.hosts) == ("1", 0, ("node1", "node2"))
    assert granted.switches["node2"] == ("spine", "leaf1")
    assert granted.notice_s == 90.0


@pytest.mark.parametrize("above", [{}, {"SLURM_TOPOLOGY_ADDR_PATTERN": "node"}])
def test_a_leader_without_switches_starts_without_slurmctld(
    tmp_path: Path, above: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    slurm = FakeSlurm()
    backend, launch, _ = submitted(slurm, tmp_path)
    backend.environ = {**backend.environ, **above}
    slurm.intercept = lambda argv, before: DOWN
    granted = backend.allocation(launch)
    assert granted is not None
    assert (granted.hosts, granted.switches) == (("node1", "node2"), {})
    assert "failed to read the switches of the nodes: Slurm does not answer" in caplog.text
    assert "failed to read the end of the allocation: Slurm does not answer" in caplog.text


@pytest.mark.parametrize("pattern", ["switch.switch.node", "block.node"])
def test_a_leader_with_switches_waits_for_slurmctld(tmp_path: Path, pattern: str) -> None:
    """Without the switches, it would assign ranks to nodes by name for the whole allocation."""
    slurm = FakeSlurm()
    backend, launch, _ = submitted(slurm, tmp_path)
    backend.environ = {**backend.environ, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    slurm.intercept = lambda argv, before: DOWN
    with pytest.raises(Unanswered, match="scontrol show"):
        backend.allocation(launch)


@pytest.mark.parametrize("what", ["job", "partitions", "topology"])
def test_a_query_that_fails_once_is_repeated(tmp_path: Path, what: str) -> None:
    slurm = FakeSlurm()
    backend, launch, _ = submitted(slurm, tmp_path)
    known = backend.allocation(launch)
    asked: list[list[str]] = []

    def fail_at_first(argv: list[str], before: int) -> Completed | None:
        if what not in argv or argv in asked:
            return None
        asked.append(argv)
        return DOWN

    slurm.intercept = fail_at_first
    assert backend.allocation(launch) == known
    assert asked


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("job", "the end of the allocation"),
        ("partitions", "the topology of the partition"),
        ("topology", "the switches of the nodes"),
    ],
)
def test_a_refused_query_loses_only_its_answer_and_is_logged(
    tmp_path: Path, what: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    slurm = FakeSlurm()
    backend, launch, _ = submitted(slurm, tmp_path)
    refused = Completed(1, "", "slurm_load: Access/permission denied")
    slurm.intercept = lambda argv, before: refused if what in argv else None
    granted = backend.allocation(launch)
    assert granted is not None
    assert (granted.switches == {}) == (what == "topology")
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert message in said


def test_the_clusters_name_is_from_the_environment_or_slurm() -> None:
    slurm = FakeSlurm(
        intercept=lambda argv, before: Completed(
            0, "Configuration data\nClusterName             = tb\nFoo = (null)\n", ""
        )
    )
    assert SlurmBackend({"SLURM_CLUSTER_NAME": "here"}, TurnedClock(), slurm).cluster() == "here"
    assert slurm.calls == []
    assert SlurmBackend({}, TurnedClock(), slurm).cluster() == "tb"
    assert slurm.calls == [["scontrol", "show", "config"]]
    slurm.intercept = lambda argv, before: Completed(0, "", "")
    assert SlurmBackend({}, TurnedClock(), slurm).cluster() == "slurm"


def test_drained_and_removed_nodes_are_noticed(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    backend, launch, job = submitted(slurm, tmp_path)
    assert backend.notices(launch, ("node1", "node2")) == ()
    slurm.nodes["node1"], job.nodes = "ALLOCATED+DRAIN", "node1"
    first, second = backend.notices(launch, ("node1", "node2"))
    assert (first.host, first.state, first.reason) == ("node1", "ALLOCATED+DRAIN", "bad fan")
    assert (second.host, second.state) == ("node2", "REMOVED")


@pytest.mark.parametrize(
    ("state", "finishes"),
    [
        ("ALLOCATED+DRAIN", True),
        ("MIXED+FAIL", True),
        ("ALLOCATED+DRAIN+REBOOT_REQUESTED", True),
        ("ALLOCATED+POWER_DOWN", True),
        ("ALLOCATED+MAINTENANCE", False),
        ("ALLOCATED+DRAIN+MAINTENANCE", False),
        ("ALLOCATED+REBOOT_ISSUED", False),
        ("DOWN+DRAIN", False),
    ],
)
def test_slurm_lets_jobs_run_on_a_drained_node_until_maintenance_begins(
    tmp_path: Path, state: str, finishes: bool
) -> None:
    slurm = FakeSlurm()
    backend, launch, _ = submitted(slurm, tmp_path)
    slurm.nodes["node1"] = state
    (notice,) = backend.notices(launch, ("node1", "node2"))
    assert (notice.host, notice.lets_finish) == ("node1", finishes)
    assert notice.down == state.startswith("DOWN")


def test_upcoming_maintenance_is_noticed_before_it_begins(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    backend, launch, _ = submitted(slurm, tmp_path)
    clock = backend.clock
    for begins_s, hosts in ((3600, []), (100, ["node2"]), (-60, ["node2"])):
        begins = datetime.fromtimestamp(clock.now() + begins_s, UTC).astimezone()
        slurm.reservations = (
            f"ReservationName=maint_1 StartTime={begins:%Y-%m-%dT%H:%M:%S}"
            " EndTime=2099-01-01T00:00:00 Nodes=node[2-3] Flags=MAINT,IGNORE_JOBS,SPEC_NODES\n"
        )
        found = backend.notices(launch, ("node1", "node2"))
        assert [notice.host for notice in found] == hosts
    assert (found[0].state, found[0].reason) == ("MAINTENANCE", "reservation maint_1")
    assert not found[0].lets_finish
    slurm.intercept = lambda argv, before: DOWN if argv[-1] == "reservations" else None
    assert backend.notices(launch, ("node1", "node2")) == (), "an unknown time gives no notice"


def test_a_stopped_slurmd_takes_no_node_from_a_running_job(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    backend, launch, _ = submitted(slurm, tmp_path)
    slurm.nodes["node1"] = slurm.nodes["node2"] = "ALLOCATED*"
    assert backend.notices(launch, ("node1", "node2")) == ()
    slurm.nodes["node2"] = "DOWN*"
    (notice,) = backend.notices(launch, ("node1", "node2"))
    assert notice.host == "node2"


def test_a_node_that_is_down_or_gone_from_the_job_gets_no_new_agent(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    backend, launch, job = submitted(slurm, tmp_path)
    slurm.nodes["node2"] = "DOWN*"
    with pytest.raises(BackendError, match=r"node2 as DOWN\+NOT_RESPONDING: bad fan"):
        backend.replace(launch, "node2")
    job.nodes = "node1"
    with pytest.raises(BackendError, match="node2 is no longer in Slurm job 1"):
        backend.replace(launch, "node2")


@pytest.mark.process
def test_a_new_agent_is_a_step_and_a_failed_step_is_an_error(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$@" > "$0.said"\necho "step creation failed" >&2\nexit 1\n')
    srun.chmod(0o755)
    backend, launch, _ = submitted(FakeSlurm(), tmp_path / "job")
    backend.environ = {**ENVIRON, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    with pytest.raises(BackendError, match="srun failed with code 1: step creation failed"):
        backend.replace(launch, "node2")
    assert "--jobid=1 --overlap --nodelist=node2" in (tmp_path / "srun.said").read_text()
    assert sys.executable in (tmp_path / "srun.said").read_text()


def test_a_requeue_adds_to_the_excluded_hosts(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    backend, launch, job = submitted(slurm, tmp_path)
    job.excluded, slurm.nodes = "node[7-8]", nodes(9)
    backend.requeue(launch, ("node2",))
    assert (job.state, job.restarts, job.excluded) == ("COMPLETING", 1, "node[2,7-8]")
    backend.requeue(launch, ("node2",))
    assert slurm.count("scontrol", "requeue") == 1
    assert slurm.count("scontrol", "update") == 1


@pytest.mark.parametrize("times_out", [True, False])
def test_a_requeue_does_not_wait_for_slurm_to_accept_the_exclude_list(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, times_out: bool
) -> None:
    """Slurm before 24.11 without accounting refuses the update after it has removed a node from the
    run, until the requesting process has exited."""
    slurm = FakeSlurm()
    backend, launch, job = submitted(slurm, tmp_path)
    slurm.nodes = nodes(4)

    def refuse(argv: list[str], before: int) -> Completed | None:
        if argv[1] != "update":
            return None
        if times_out:
            raise TimeoutError("scontrol did not end within 2 s")
        return LATER

    slurm.intercept, begun = refuse, backend.clock.monotonic()
    backend.requeue(launch, ("node2",))
    assert (job.restarts, slurm.count("scontrol", "update")) == (1, 1)
    assert backend.clock.monotonic() == begun
    assert "Slurm did not confirm that the next run excludes node2" in caplog.text


@pytest.mark.parametrize("answer", [DOWN, Completed(-15, "", "")])
def test_the_exclude_list_is_retried_if_slurmctld_is_briefly_down(
    tmp_path: Path, answer: Completed
) -> None:
    """A code of -15: the SIGTERM with which Slurm ends the run has also ended scontrol."""
    slurm = FakeSlurm()
    backend, launch, job = submitted(slurm, tmp_path)
    slurm.nodes = nodes(4)

    def fail_twice(argv: list[str], before: int) -> Completed | None:
        return answer if argv[1] == "update" and slurm.count("scontrol", "update") < 3 else None

    slurm.intercept = fail_twice
    backend.requeue(launch, ("node2",))
    assert job.excluded == "node2"


def test_a_job_requeued_by_another_keeps_its_excluded_nodes(tmp_path: Path) -> None:
    """A late request knows less. A partitioned agent suspects all hosts that it cannot reach."""
    slurm = FakeSlurm()
    backend, launch, job = submitted(slurm, tmp_path)
    slurm.nodes, job.state, job.restarts, job.excluded = nodes(4), "PENDING", 1, "node4"
    backend.requeue(launch, ("node3",))
    assert job.excluded == "node4"
    assert slurm.count("scontrol", "requeue") == 0


def test_a_requeue_whose_answer_was_lost_still_excludes_the_nodes(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    backend, launch, job = submitted(slurm, tmp_path)
    slurm.nodes = nodes(4)

    def lose_answer(argv: list[str], before: int) -> Completed | None:
        if argv[1] == "requeue":
            slurm.answer(argv)
            slurm.intercept = lambda argv, before: None
            return Completed(1, "", "scontrol: error: not authorized just now")
        return None

    slurm.intercept = lose_answer
    with pytest.raises(BackendError, match="not authorized"):
        backend.requeue(launch, ("node2",))
    backend.requeue(launch, ("node2",))
    assert (job.restarts, job.excluded) == (1, "node2")


@pytest.mark.parametrize(
    ("reason", "exit_code", "queued"),
    [
        ("JobLaunchFailure", "0:9", True),
        ("RaisedSignal:9(Killed)", "0:9", True),
        ("TimeLimit", "0:0", True),
        ("None", "0:15", False),
    ],
)
def test_a_broken_run_is_requeued_while_slurm_ends_it_but_not_a_cancelled_one(
    tmp_path: Path, reason: str, exit_code: str, queued: bool
) -> None:
    slurm = FakeSlurm()
    backend, launch, job = submitted(slurm, tmp_path)
    job.state, job.reason, job.exit_code = "COMPLETING", reason, exit_code
    if queued:
        backend.requeue(launch, ())
    else:
        with pytest.raises(Ended, match="it is being ended"):
            backend.requeue(launch, ())
    assert job.restarts == int(queued)


def test_a_requeue_allows_hosts_again_except_those_excluded_by_spec_or_person(
    tmp_path: Path,
) -> None:
    slurm = FakeSlurm()
    backend, launch, job = submitted(slurm, tmp_path)
    launch = replace(launch, slurm=SlurmSpec(exclude="node[1-2]"))
    job.excluded, slurm.nodes = "node[1-4,9]", nodes(9)
    backend.requeue(launch, ("node1",), again=("node2", "node3", "node4"))
    assert job.excluded == "node[1-2,9]"


def test_a_job_that_already_runs_again_is_not_requeued_by_an_old_leader(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    backend, launch, job = submitted(slurm, tmp_path)
    job.restarts = 1
    backend.requeue(launch, ("node2",))
    assert (job.state, job.excluded) == ("RUNNING", "(null)")


@pytest.mark.parametrize(
    ("state", "said"), [("CANCELLED", "has ended"), ("COMPLETING", "is being ended")]
)
def test_a_job_that_has_ended_cannot_be_requeued(tmp_path: Path, state: str, said: str) -> None:
    slurm = FakeSlurm()
    backend, launch, job = submitted(slurm, tmp_path)
    job.state = state
    with pytest.raises(Ended, match=said):
        backend.requeue(launch, ("node2",))
    assert slurm.count("scontrol", "update") == 0


def test_clearing_cancels_and_returns_when_nothing_is_left(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    backend, launch, _ = submitted(slurm, tmp_path)
    backend.clear(launch)
    backend.clear(launch)
    assert slurm.count("scancel") == 1
    assert backend.standing(launch) is None


def test_a_job_that_does_not_end_is_an_error_with_what_to_type(tmp_path: Path) -> None:
    slurm = FakeSlurm(cancels_at_once=False)
    backend, launch, _ = submitted(slurm, tmp_path)
    with pytest.raises(BackendError, match="is still COMPLETING") as failed:
        backend.clear(launch)
    assert "squeue -s -j 1" in failed.value.fix


def test_a_job_that_is_queued_again_while_it_is_cancelled_is_cancelled_again(
    tmp_path: Path,
) -> None:
    slurm = FakeSlurm()
    backend, launch, job = submitted(slurm, tmp_path)

    def requeue_meanwhile(argv: list[str], before: int) -> Completed | None:
        if argv[0] != "scancel" or slurm.count("scancel") > 1:
            return None
        job.state = "PENDING"
        return Completed(0, "", "")

    slurm.intercept = requeue_meanwhile
    backend.clear(launch)
    assert (job.state, slurm.count("scancel")) == ("CANCELLED", 2)


def test_a_requeue_waits_until_slurm_marks_an_unreachable_host_down(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    backend, launch, job = submitted(slurm, tmp_path)
    backend.environ = {**ENVIRON, "SLURMD_NODENAME": "node2"}
    asked: list[int] = []

    def not_responding(argv: list[str], before: int) -> Completed | None:
        if argv[0] != "srun":
            return None
        asked.append(before)
        if len(asked) == 3:
            job.nodes = "node2"
        raise TimeoutError("srun did not end within 10 s")

    slurm.intercept = not_responding
    backend.requeue(launch, ())
    assert len(asked) == 3
    assert (job.state, job.restarts) == ("COMPLETING", 1)


def test_a_requeue_waits_for_a_busy_slurmctld(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    backend, launch, job = submitted(slurm, tmp_path)
    backend.environ = {**ENVIRON, "SLURMD_NODENAME": "node2"}
    slurm.nodes = nodes(3)
    looked: list[int] = []

    def fail_at_first(argv: list[str], before: int) -> Completed | None:
        if argv[:3] == ["scontrol", "show", "node"]:
            looked.append(before)
            if len(looked) < 4:
                return DOWN
            job.nodes = "node2"
        return Completed(1, "", "srun: error") if argv[0] == "srun" else None

    slurm.intercept = fail_at_first
    backend.requeue(launch, ("node1",))
    assert len(looked) == 4
    assert (job.restarts, job.excluded) == (1, "node1")


def test_a_requeue_excludes_no_node_that_the_job_needs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The job would pend with BadConstraints, even after the node is resumed."""
    slurm = FakeSlurm()
    backend, launch, job = submitted(slurm, tmp_path)
    slurm.nodes["node2"] = "ALLOCATED+DRAIN"
    backend.requeue(launch, ("node2",))
    assert (job.restarts, job.excluded) == (1, "(null)")
    assert "too few other nodes are left, and it is ALLOCATED+DRAIN" in caplog.text


def test_a_node_that_returned_is_used_again_if_the_job_needs_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slurm = FakeSlurm()
    backend, launch, job = submitted(slurm, tmp_path)
    backend.requeue(launch, ("node2",))
    assert (job.restarts, job.excluded) == (1, "(null)")
    assert "not excluding node2: the job needs it, and it is IDLE again" in caplog.text


@pytest.mark.parametrize("cluster", ["tb", "other"])
def test_a_node_with_strikes_stays_excluded_if_the_next_leader_would_reject_it(
    tmp_path: Path, cluster: str
) -> None:
    """Otherwise each run of the job would be requeued at once."""
    slurm = FakeSlurm()
    backend, launch, job = submitted(slurm, tmp_path / "job")
    backend.environ = {**ENVIRON, "SLURM_CLUSTER_NAME": "tb"}
    now = backend.clock.now()
    for attempt in (1, 2):
        strike = host_strikes.Strike(
            at=now, host="node2", job="j", attempt=attempt, kind="host-lost", cause="mute"
        )
        host_strikes.record(host_strikes.path_of(tmp_path, cluster), strike)
    backend.requeue(launch, ("node2",))
    assert job.excluded == ("node2" if cluster == "tb" else "(null)")


def test_a_requeue_excludes_no_node_unknown_to_slurm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Slurm would refuse the whole exclude list."""
    slurm = FakeSlurm()
    backend, launch, job = submitted(slurm, tmp_path)
    slurm.nodes = nodes(4)
    backend.requeue(launch, ("ghost", "node2"))
    assert (job.restarts, job.excluded) == (1, "node2")
    assert "not excluding ghost: Slurm has no such node" in caplog.text
    assert backend.known(("ghost", "node2")) == ("node2",)


def test_a_host_with_strikes_unknown_to_slurm_blocks_no_submission(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slurm = FakeSlurm()
    backend = SlurmBackend({"SLURM_CLUSTER_NAME": "tb"}, clock := TurnedClock(), slurm)
    for host in ("ghost", "node2"):
        pinned = host_strikes.Pinned(at=1.0, host=host, use="never", by="me", reason="a fan")
        host_strikes.record(host_strikes.path_of(tmp_path, "tb"), pinned)
    assert left_out_at_submission(tmp_path, backend, {}, clock) == ("node2",)
    assert "ignoring excluded hosts that the cluster does not have: ghost" in caplog.text


def test_the_queried_topology_is_that_of_the_partition(tmp_path: Path) -> None:
    backend, launch, _ = submitted(slurm := FakeSlurm(), tmp_path)
    backend.environ = {**ENVIRON, "SLURM_JOB_PARTITION": "gpu"}

    def several(argv: list[str], before: int) -> Completed | None:
        if argv[:3] == ["scontrol", "show", "partitions"]:
            names = ("PartitionName=cpu Topology=flat", "PartitionName=gpu Topology=blocks")
            return Completed(0, "\n".join(names), "")
        if argv[:3] == ["scontrol", "show", "topology"]:
            own = argv[3:] == ["blocks"]
            return Completed(0, "BlockName=b1 Nodes=node[1-2]" if own else "", "")
        return None

    slurm.intercept = several
    granted = backend.allocation(launch)
    assert granted is not None
    assert granted.switches == {"node1": ("b1",), "node2": ("b1",)}


@pytest.mark.parametrize(("left_s", "most"), [(120.0, 90.0), (20.0, 0.0), (None, 330.0)])
def test_a_leader_waits_for_slurms_verdict_until_shortly_before_the_time_limit(
    tmp_path: Path, left_s: float | None, most: float
) -> None:
    """Slurm never requeues a job that has reached its time limit."""
    slurm = FakeSlurm()
    _, launch, job = submitted(slurm, tmp_path)
    clock = TurnedClock()
    backend = SlurmBackend({**ENVIRON, "SLURMD_NODENAME": "node2"}, clock, slurm)
    job.ends = None if left_s is None else clock.now() + left_s

    def not_responding(argv: list[str], before: int) -> Completed | None:
        if argv[0] != "srun":
            return None
        clock.sleep(10.0)
        raise TimeoutError("srun did not end within 10 s")

    slurm.intercept, begun = not_responding, clock.monotonic()
    backend.requeue(launch, ("node1",))
    assert job.restarts == 1
    assert most <= clock.monotonic() - begun <= most + 11.0
