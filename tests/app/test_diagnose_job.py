"""`ndctl diagnose` on a job: the attempt it selects, and a running job."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from orchestrator.app.diagnose_job import diagnose_job, job_text, story_of
from orchestrator.app.remote import Found as FoundJob
from orchestrator.app.snapshots import snapshot_of
from orchestrator.app.submission import submit_job
from orchestrator.cli import cli
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import (
    AgentRegistered,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    EvidenceGathered,
    HangDetected,
    HangJudged,
    HangOver,
    HostStopped,
    RankEvidence,
    RankExited,
    StepReached,
    StragglerFound,
)
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.dashboard.snapshot import Snapshot, read_snapshot
from orchestrator.errors import JobError
from orchestrator.journal.journal import Entry, Journal, to_line
from orchestrator.seams import LaunchStatus
from tests.agent.world import TurnedClock
from tests.diagnosis.dumps.test_load_evidence import ended_in
from tests.diagnosis.hang.test_post_mortem import USUAL
from tests.job.test_replan_and_rollback import (
    job_with_replan,
    plan_with_peak,
    planner_answers,
    runs_out_of_memory,
)
from tests.jobs_on_disk import JOB, NoCluster, cluster, lead, on_slurm, submission
from tests.read_events import as_read

__all__ = ["cluster"]
NOW = TurnedClock().now()


def diagnosed(root: Path, *options: str) -> Result:
    return CliRunner().invoke(cli, ["diagnose", JOB, "--run-root", str(root), *options])


def attempt_fails(attempt: int, *before: Event) -> list[Event]:
    at = NOW + 100 * attempt
    return [
        StepReached(at=at, attempt=attempt, step=1, loss=1.0, tokens_per_second=9.0),
        CheckpointSaved(at=at + 1, attempt=attempt, step=5 * attempt),
        *before,
        exits(attempt),
        *(HostStopped(at=at + 10, attempt=attempt, host=host, finished=False) for host in HOSTS),
    ]


def exits(attempt: int) -> RankExited:
    return RankExited(
        at=NOW + 100 * attempt + 9,
        attempt=attempt,
        rank=0,
        host="host-0",
        exit_code=None,
        signal=9,
        step=8,
        stopped=False,
        detected_after_s=0.1,
        error=None,
        log_tail=(),
    )


HOSTS = ("host-0", "host-1")


def judged(attempt: int) -> HangJudged:
    return HangJudged(
        at=NOW + 100 * attempt + 5,
        attempt=attempt,
        verdict="never-entered",
        cause="rank 1 did not call it",
        scope="rank",
        ranks=(1,),
        hosts=("host-0",),
        confidence=0.95,
    )


def stood_still(attempt: int) -> HangDetected:
    return HangDetected(
        at=NOW + 100 * attempt + 3,
        attempt=attempt,
        phase="train",
        step=1,
        stalled_s=2.0,
        limit_s=1.0,
        behind=(),
    )


def moved_again(attempt: int) -> HangOver:
    return HangOver(at=NOW + 100 * attempt + 4, attempt=attempt, rank=0, step=2, phase="train")


def led(root: Path, *events: Event) -> None:
    submit_job.submit(submission(root), {}, TurnedClock())
    agents = [
        AgentRegistered(at=NOW, host=host, address="::1", devices=2, pid=5, incarnation="1")
        for host in HOSTS
    ]
    lead(root, *agents, *events)


def test_the_newest_attempt_that_hung_is_selected(tmp_path: Path, cluster: NoCluster) -> None:
    """Attempt 1 recovered from a hang, a watchdog reported attempt 2, attempt 3 failed
    otherwise."""
    passing = attempt_fails(1, stood_still(1), moved_again(1))
    led(tmp_path, *passing, *attempt_fails(2, judged(2)), *attempt_fails(3))
    assert json.loads(diagnosed(tmp_path, "--json").output)["attempt"] == 2
    assert "attempt     2\n" in diagnosed(tmp_path).output
    assert json.loads(diagnosed(tmp_path, "--json", "--attempt", "1").output)["attempt"] == 1


def test_of_ranks_with_different_sizes_the_aborted_one_is_named(
    tmp_path: Path, cluster: NoCluster
) -> None:
    """The verdict of the leader, from dumps that peers wrote at exit and from the aborted rank."""
    words = (
        "  what():  [enforce fail at third_party/gloo/gloo/transport/tcp/pair.cc:456]"
        " op.preamble.length <= op.nbytes. 16 vs 8. Received data size doesn't match expected size."
        " Is there a distributed collective mismatch in your code?"
    )
    aborted = as_read(replace(exits(1), rank=2, host="host-1", signal=6, log_tail=(words,)))
    led(tmp_path, *attempt_fails(1, aborted))
    traces = RunDir(tmp_path / JOB).traces(1)
    traces.mkdir(parents=True)
    ended_in(traces, {0: USUAL, 1: USUAL, 3: USUAL})
    said = json.loads(diagnosed(tmp_path, "--json", "--attempt", "1").output)
    assert (said["kind"], said["ranks"], said["hosts"]) == ("mismatch", [2], [])
    assert said["rank_hosts"] == {"2": "host-1"}
    assert "rank 2 on host-1 (the program" in diagnosed(tmp_path, "--attempt", "1").output


@pytest.mark.parametrize("asked", ["0", "9"])
def test_an_unknown_attempt_is_refused_with_the_number_of_attempts(
    tmp_path: Path, cluster: NoCluster, asked: str
) -> None:
    led(tmp_path, *attempt_fails(1))
    told = diagnosed(tmp_path, "--attempt", asked)
    assert isinstance(told.exception, JobError)
    assert f"{JOB} has no attempt {asked}; it has 2 attempts" in str(told.exception)


def test_each_attempt_is_analysed_with_its_own_plan(tmp_path: Path) -> None:
    job = job_with_replan()
    runs_out_of_memory(job)
    planner_answers(job, 60, 2)
    told = enumerate(job.all, 1)
    entries = [Entry(seq=seq, event=event, actions=orders) for seq, (event, orders) in told]
    run_dir = RunDir(tmp_path)
    run_dir.journal.write_bytes(b"".join(map(to_line, entries)))
    story = story_of(run_dir)
    assert {number: one.plan for number, one in story.attempts.items()} == {
        1: plan_with_peak(70),
        2: plan_with_peak(60),
    }
    assert {one.hosts for one in story.attempts.values()} == {("host-0", "host-1")}
    assert story.newest == 2


# A healthy job


def reached(root: Path, step: int, at: float) -> None:
    """Write metrics as rank 0 does."""
    line = {"attempt": 1, "step": step, "loss": 1.0, "time": at}
    RunDir(root / JOB).metrics.write_text(json.dumps(line) + "\n")


def test_diagnose_reports_a_job_that_ended_without_failure(
    tmp_path: Path, cluster: NoCluster
) -> None:
    spec = submission(tmp_path).planned.spec
    assert isinstance(spec, JobSpec)
    steps = spec.train.steps
    finished = [HostStopped(at=NOW + 200, attempt=1, host=host, finished=True) for host in HOSTS]
    done = StepReached(at=NOW + 190, attempt=1, step=steps, loss=1.0, tokens_per_second=9.0)
    exits_in_order = [
        replace(exits(1), at=NOW + 195, rank=rank, host=HOSTS[rank // 2], exit_code=0, signal=None)
        for rank in range(4)
    ]
    led(tmp_path, done, *exits_in_order, *finished)
    reached(tmp_path, steps, NOW + 190)
    told = diagnosed(tmp_path)
    assert (told.exit_code, told.output) == (0, f"{JOB} succeeded: step {steps} of {steps}\n")
    said = json.loads(diagnosed(tmp_path, "--json").output)
    assert (said["kind"], said["healthy"], said["ranks"], said["advice"]) == (
        "healthy",
        True,
        [],
        "",
    )


def stepped(at: float, attempt: int = 1) -> StepReached:
    return StepReached(at=at, attempt=attempt, step=8, loss=1.0, tokens_per_second=9.0)


@contextmanager
def leading(root: Path) -> Iterator[None]:
    """Hold the journal as a leader does."""
    with Journal(RunDir(root / JOB).journal, TurnedClock()):
        yield


def snapshot_at(root: Path, at: float) -> Snapshot:
    snapshot = read_snapshot(RunDir(root / JOB), at)
    assert snapshot is not None
    return snapshot


def said_at(root: Path, at: float) -> str:
    return job_text(diagnose_job(snapshot_at(root, at), None))


def test_a_job_without_a_leader_has_the_state_of_its_scheduler(
    tmp_path: Path, cluster: NoCluster
) -> None:
    submit_job.submit(submission(tmp_path), {}, TurnedClock())
    on_slurm(tmp_path)
    cluster.held = "Slurm job 12 is PENDING (Resources)"
    found = diagnose_job(snapshot_of(FoundJob(RunDir(tmp_path / JOB)), {}, TurnedClock()), None)
    assert found.in_order == f"{JOB} is PENDING: no rank trains yet, and no hang was detected"


def test_diagnose_prints_one_line_for_a_healthy_job(
    tmp_path: Path, cluster: NoCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    led(tmp_path, stepped(NOW + 20))
    reached(tmp_path, 8, NOW + 20)
    line = f"{JOB} is healthy: step 8 of 24, last step 4.0 s ago; no late ranks"
    with leading(tmp_path):
        assert said_at(tmp_path, NOW + 24) == line
        monkeypatch.setattr("orchestrator.system.SystemClock", lambda: TurnedClock(NOW + 24))
        told = diagnosed(tmp_path)
        assert (told.exit_code, told.output) == (0, f"{line}\n")
        said = json.loads(diagnosed(tmp_path, "--json").output)
        assert (said["kind"], said["healthy"], said["cause"]) == ("healthy", True, line)
    # Without a leader it is not known whether the job runs.
    assert "is healthy" not in said_at(tmp_path, NOW + 24)


def test_for_a_job_that_recovered_from_a_hang_the_recovery_is_shown_first(
    tmp_path: Path, cluster: NoCluster
) -> None:
    led(tmp_path, *attempt_fails(1, stood_still(1), judged(1)), stepped(NOW + 190, attempt=2))
    reached(tmp_path, 8, NOW + 190)
    with leading(tmp_path):
        first, second, *rest = said_at(tmp_path, NOW + 195).splitlines()
    assert first == f"{JOB} is healthy: step 8 of 24, last step 5.0 s ago; no late ranks"
    assert second == "an earlier attempt failed:"
    assert any("attempt     1" in line for line in rest)


def test_a_job_with_a_late_rank_is_not_called_healthy(tmp_path: Path, cluster: NoCluster) -> None:
    late = StragglerFound(
        at=NOW + 22,
        attempt=1,
        host="host-1",
        rank=3,
        own_s=2.0,
        peers_s=1.0,
        step_s=2.5,
        steps=8,
        lost_tokens_per_second=None,
    )
    led(tmp_path, stepped(NOW + 20), late)
    reached(tmp_path, 8, NOW + 20)
    with leading(tmp_path):
        assert "is healthy" not in said_at(tmp_path, NOW + 24)


def test_a_job_whose_next_step_is_late_is_not_called_healthy(
    tmp_path: Path, cluster: NoCluster
) -> None:
    """The ranks may hang in a save, for which ndctl waits longer than for a step."""
    led(tmp_path, stepped(NOW + 20))
    reached(tmp_path, 24, NOW + 20)
    with leading(tmp_path):
        first, second = said_at(tmp_path, NOW + 115).splitlines()
        found = diagnose_job(snapshot_at(tmp_path, NOW + 115), 1)
    doubt = "no hang was detected, but step 24 of 24 was 1 min 35 s ago"
    assert first == f"{JOB} is RUNNING, and {doubt}"
    assert second == f"next        to see what the ranks do: ndctl snapshot {JOB}"
    assert (found.diagnosis.kind, found.diagnosis.ranks, found.in_order) == ("not-known", (), "")


def test_a_job_that_cannot_save_is_not_called_healthy(tmp_path: Path, cluster: NoCluster) -> None:
    failed = CheckpointFailed(at=NOW + 21, attempt=1, step=8, why="rank 0: No space left on device")
    led(tmp_path, stepped(NOW + 20), failed)
    reached(tmp_path, 8, NOW + 20)
    with leading(tmp_path):
        said = said_at(tmp_path, NOW + 22)
    assert "is healthy" not in said
    assert "the save at step 8 failed: rank 0: No space left on device" in said


def test_a_program_that_reports_no_step_is_not_searched_for_a_hang(
    tmp_path: Path, cluster: NoCluster
) -> None:
    led(tmp_path, stepped(NOW + 20))
    with leading(tmp_path):
        said = said_at(tmp_path, NOW + 24)
    assert said == f"{JOB} is RUNNING: step 8 of 24, and no hang was detected"


def test_of_a_job_whose_leader_died_that_is_said(tmp_path: Path, cluster: NoCluster) -> None:
    led(tmp_path, stepped(NOW + 20))
    reached(tmp_path, 8, NOW + 20)
    said = said_at(tmp_path, NOW + 24)
    assert said.startswith("attempt 1 did not hang: the leader")
    assert "died without recording a reason" in said
    assert "TORCH_FR_BUFFER_SIZE" not in said


FIX = "`kubectl cluster-info` shows whether it is up"


@contextmanager
def unreachable(cluster: NoCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scheduler is unreachable, two minutes after the last step of `led`."""
    cluster.says = LaunchStatus("Slurm job 12", held=True, unknown="it is unreachable", fix=FIX)
    with monkeypatch.context() as patch:
        patch.setattr("orchestrator.system.SystemClock", lambda: TurnedClock(NOW + 140))
        yield


def test_of_a_job_whose_scheduler_is_unreachable_only_the_last_known_state_is_said(
    tmp_path: Path, cluster: NoCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of a job on Kubernetes has no leader here, and the job may train."""
    led(tmp_path, stepped(NOW + 20))
    reached(tmp_path, 8, NOW + 20)
    with unreachable(cluster, monkeypatch):
        first, last, *after = diagnosed(tmp_path).output.splitlines()
        of_attempt = diagnosed(tmp_path, "--attempt", "1").output
        said = json.loads(diagnosed(tmp_path, "--json").output)
    assert first == "it is unreachable"
    assert last.startswith(f"{JOB} was RUNNING as of ")
    assert last.endswith("(2 min 00 s ago): step 8 of 24, and no hang was detected")
    assert len(after) == 1
    assert after[0].startswith(f"next        {FIX}; to ask again: ndctl status {JOB}")
    assert of_attempt.splitlines()[:2] == [first, last]
    assert (said["kind"], said["healthy"], said["hosts"]) == ("not-known", False, [])
    assert said["cause"] == f"{first}\n{last}"


def test_a_verdict_is_not_lost_when_the_scheduler_is_unreachable(
    tmp_path: Path, cluster: NoCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    led(tmp_path, *attempt_fails(1, stood_still(1), judged(1)))
    with unreachable(cluster, monkeypatch):
        first, last, *verdict = diagnosed(tmp_path).output.splitlines()
    assert first == "it is unreachable"
    assert " as of " in last
    assert any("attempt     1" in line for line in verdict)


def test_of_a_job_that_waits_in_its_queue_again_that_is_said(
    tmp_path: Path, cluster: NoCluster
) -> None:
    led(tmp_path, stepped(NOW + 20))
    cluster.held = "Slurm job 12 is PENDING (Resources)"
    said = diagnosed(tmp_path).output
    assert said == f"{JOB} is PENDING: no rank trains yet, and no hang was detected\n"


def test_of_a_job_that_recovers_the_reason_is_said(tmp_path: Path, cluster: NoCluster) -> None:
    """The other ranks have not stopped yet, so there is no incident."""
    led(tmp_path, stepped(NOW + 20), exits(1))
    with leading(tmp_path):
        said = said_at(tmp_path, NOW + 124)
    assert said == "attempt 1 did not hang: rank 0 on host-0 exited"


def test_a_decision_replaces_the_advice(tmp_path: Path, cluster: NoCluster) -> None:
    """The verdict names a host to exclude, but the rules kept it."""
    led(tmp_path, *attempt_fails(1, stood_still(1), judged(1)))
    said = diagnosed(tmp_path, "--attempt", "1").output
    assert "exclude the host" not in said
    assert "ndctl did   " in said
    assert "restart" in said.partition("ndctl did")[2].splitlines()[0]


def test_of_a_rank_that_was_killed_the_incident_is_told_and_no_hang_is_looked_for(
    tmp_path: Path, cluster: NoCluster
) -> None:
    led(tmp_path, *attempt_fails(1), stepped(NOW + 190, attempt=2))
    reached(tmp_path, 8, NOW + 190)
    run_dir = RunDir(tmp_path / JOB)
    for attempt in (1, 2):
        run_dir.traces(attempt).mkdir(parents=True)
        (run_dir.traces(attempt) / "rank-0.stacks").touch()  # as each rank does when it starts
    with leading(tmp_path):
        assert said_at(tmp_path, NOW + 195).splitlines() == [
            f"{JOB} is healthy: step 8 of 24, last step 5.0 s ago; no late ranks"
        ]
        ended_in(run_dir.traces(1), {1: USUAL})
        told = said_at(tmp_path, NOW + 195).splitlines()
    assert told[1:3] == [
        "an earlier attempt failed:",
        "attempt 1 did not hang: rank 0 was killed by SIGKILL; culprit rank 0 on host-0",
    ]
    assert told[3].startswith("ndctl did   restart as attempt 2")
    assert len(told) == 4


ASLEEP = ("Thread 0x7f (most recent call first):", '  File "early.py", line 7 in <module>')


def collected(host: str, ranks: tuple[int, ...], ended: dict[str, str]) -> EvidenceGathered:
    found = tuple(
        RankEvidence(
            rank=rank, pid=9, process_state="S", step=3, phase="train", age_s=9.0, stack=ASLEEP
        )
        for rank in ranks
    )
    return EvidenceGathered(at=NOW + 104, attempt=1, host=host, ranks=found, ended=ended)


@pytest.mark.parametrize("journal_knows", [True, False])
def test_a_rank_that_had_ended_is_not_blamed_for_the_stack_that_it_could_not_give(
    tmp_path: Path, cluster: NoCluster, journal_knows: bool
) -> None:
    """Rank 3 returned early. The journals of older versions do not say so, but the traces do."""
    ended = {"3": "exit code 0"}
    answers = (
        collected("host-0", (0, 1), {}),
        collected("host-1", (2,), ended if journal_knows else {}),
    )
    led(tmp_path, *attempt_fails(1, stood_still(1), *answers))
    traces = RunDir(tmp_path / JOB).traces(1)
    traces.mkdir(parents=True)
    (traces / "rank-3.stacks").touch()  # as each rank does when it starts
    if not journal_knows:
        (traces / "host-host-1.jsonl").write_text(json.dumps({"ended": ended}) + "\n")
    said = json.loads(diagnosed(tmp_path, "--json", "--attempt", "1").output)
    assert (said["ranks"], said["hosts"]) == ([], [])
    assert said["cause"].startswith("rank 3 had ended (exit code 0); ")
    assert "no culprit" in diagnosed(tmp_path, "--attempt", "1").output


def test_an_empty_file_of_stacks_alone_blames_no_rank(tmp_path: Path, cluster: NoCluster) -> None:
    """The agent of host-1 sent no evidence, so it is not known whether rank 3 was asked."""
    led(tmp_path, *attempt_fails(1, stood_still(1), collected("host-0", (0, 1), {})))
    traces = RunDir(tmp_path / JOB).traces(1)
    traces.mkdir(parents=True)
    for rank in (2, 3):
        (traces / f"rank-{rank}.stacks").touch()
    said = json.loads(diagnosed(tmp_path, "--json", "--attempt", "1").output)
    assert (said["ranks"], said["hosts"]) == ([], [])
