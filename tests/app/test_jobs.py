import asyncio
import fcntl
import json
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.agent.connection import Line
from orchestrator.app import cancel_job, schedulers
from orchestrator.app.ranks.profiles import rank_profiles
from orchestrator.app.ranks.stacks import rank_stacks
from orchestrator.app.remote import Found
from orchestrator.app.snapshots import snapshots_of
from orchestrator.app.submission import payload, submit_job
from orchestrator.app.submission.resume_check import look_back
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.last_metric import Reached
from orchestrator.contract.files.leader_file import Term, announce
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import Allocation, LaunchPlan
from orchestrator.contract.messages.agent_protocol import (
    ProfileWish,
    RankProfiles,
    RankStacks,
    Register,
)
from orchestrator.contract.messages.events import (
    CancelRequested,
    CheckpointFailed,
    JobSubmitted,
    LeaderStarted,
)
from orchestrator.contract.spec.job_spec import INIT_TIMEOUT_S, JobSpec
from orchestrator.contract.submission_payload import Handover
from orchestrator.dashboard.status import status_text
from orchestrator.dashboard.unsaved_steps import at_risk
from orchestrator.errors import BackendError, DrillError, JobError, PlanError, Unanswered
from orchestrator.job.stage import Ended
from orchestrator.job.state import Run
from orchestrator.job.transitions import fold
from orchestrator.job_paths import find_job, jobs, run_root_of
from orchestrator.job_secret import draw, secret_from
from orchestrator.journal.current_launch import Launched, current_launch, current_spec
from orchestrator.journal.journal import to_line
from orchestrator.leader.leader_server import LeaderServer, Questions
from orchestrator.seams import LaunchStatus
from tests.agent.world import TurnedClock
from tests.dashboard.dashboard_story import START, journal, recovered
from tests.jobs_on_disk import JOB, NoCluster, cluster, drill, events, lead, on_slurm, submission

__all__ = ["cluster"]
CLOCK = TurnedClock()


def submit(run_root: Path, *overrides: str, **more: object) -> submit_job.Submitted:
    return submit_job.submit(submission(run_root, *overrides, **more), {}, TurnedClock())


def status_of(run_dir: RunDir) -> str:
    (snapshot,) = snapshots_of([(Found(run_dir), True)], {}, TurnedClock())
    return status_text(snapshot, UTC)


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Hold the journal as a leader does."""
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("option", "environ", "in_spec", "root"),
    [
        ("here", {"NDCTL_RUN_ROOT": "there"}, True, "here"),
        (None, {"NDCTL_RUN_ROOT": "there"}, True, "there"),
        (None, {}, True, "of-the-spec"),
        (None, {}, False, "ndctl-runs"),
        (None, {"NDCTL_RUN_ROOT": ""}, False, "ndctl-runs"),
    ],
)
def test_the_run_root_is_from_the_option_the_environment_or_the_spec(
    option: str | None, environ: dict[str, str], in_spec: bool, root: str, tmp_path: Path
) -> None:
    spec = submission(tmp_path, "run_root=of-the-spec").planned.spec
    assert run_root_of(option, environ, spec.run_root if in_spec else "") == Path(root)


def test_a_submission_writes_the_run_directory_before_it_starts_agents(
    tmp_path: Path, cluster: NoCluster
) -> None:
    submitted = submit(tmp_path)
    run_dir = submitted.run_dir
    assert run_dir.path == tmp_path / JOB
    assert submitted.known == 0
    assert run_dir.token.stat().st_mode & 0o777 == 0o600
    assert len(run_dir.token.read_text()) > 30
    assert json.loads(run_dir.plan(1).read_text())["mesh"]
    config = json.loads(run_dir.trainer_config(1).read_text())
    assert (config["out"], config["pause_s"]) == (str(run_dir.path), 0.0)
    (job,) = events(tmp_path)
    assert isinstance(job, JobSubmitted)
    assert (job.resume, job.plan_number, job.init_timeout) == (False, 1, INIT_TIMEOUT_S)
    (launch,) = cluster.submitted
    assert launch == job.launch
    assert current_launch(run_dir) == Launched(backend=job.backend, launch=launch)
    assert (launch.hosts, launch.launch) == (("host-0", "host-1"), 1)


def test_a_running_job_is_not_started_again(tmp_path: Path, cluster: NoCluster) -> None:
    run_dir = submit(tmp_path).run_dir
    said = "e2e already exists and has not ended: SUBMITTED, submitted"
    with written(run_dir.journal), pytest.raises(JobError, match=said):
        submit(tmp_path, resume=True)
    assert len(cluster.submitted) == 1


@pytest.mark.parametrize("more", [{}, {"resume": True}, {"new": True}])
def test_a_job_whose_agents_start_is_not_started_again(
    tmp_path: Path, cluster: NoCluster, more: dict[str, bool]
) -> None:
    """Its leader opens the journal some seconds after the submission."""
    run_dir = submit(tmp_path).run_dir
    cluster.says = LaunchStatus("agents live", held=True, running=True)
    said = "e2e already exists and has not ended: SUBMITTED, submitted"
    for again in (
        submit,
        lambda root, **more: submit_job.check(submission(root, **more), {}, CLOCK),
    ):
        with pytest.raises(JobError, match=said) as refused:
            again(tmp_path, **more)
        assert "cancel it with" in refused.value.fix
    planned = submission(tmp_path).planned
    assert isinstance(planned.spec, JobSpec)
    assert look_back(planned.spec, None, run_dir, {}).refusal is not None
    assert (len(cluster.submitted), cluster.cleared) == (1, [])
    cluster.says = None  # they died before one of them led
    submit(tmp_path, **(more or {"new": True}))
    assert len(cluster.submitted) == 2


def test_a_job_that_is_being_submitted_is_neither_submitted_nor_cancelled(
    tmp_path: Path, cluster: NoCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch may be slow. Meanwhile the journal has the job."""
    others: list[str] = []

    def slowly(handover: Handover) -> None:
        for more in ({}, {"resume": True}, {"new": True}):
            with pytest.raises(JobError, match="is being submitted") as refused:
                submit(tmp_path, **more)
            others.append(refused.value.fix)
        with pytest.raises(JobError, match="is being submitted"):
            cancel_job.cancel(RunDir(tmp_path / JOB), {}, CLOCK)
        cluster.submitted.append(handover.launch)

    monkeypatch.setattr(cluster, "submit", slowly)
    submit(tmp_path)
    assert [launch.launch for launch in cluster.submitted] == [1]
    assert len(others) == 3
    assert "ndctl status e2e" in others[0]
    assert cluster.cleared == []


def test_a_job_name_that_differs_only_in_case_is_refused(
    tmp_path: Path, cluster: NoCluster
) -> None:
    submit(tmp_path)
    with pytest.raises(JobError, match="job E2E differs from e2e in"):
        submit(tmp_path, "name=E2E")
    assert len(cluster.submitted) == 1


@pytest.mark.parametrize("ended", [True, False])
def test_an_existing_job_needs_resume_or_new(
    tmp_path: Path, cluster: NoCluster, ended: bool
) -> None:
    submit(tmp_path)
    if ended:
        lead(tmp_path, CancelRequested(at=CLOCK.now(), by="me"))
    with pytest.raises(
        JobError, match="ended CANCELLED" if ended else "was interrupted"
    ) as refused:
        submit(tmp_path)
    assert "--resume" in refused.value.fix
    assert "--new" in refused.value.fix


def test_a_resume_needs_an_earlier_run(tmp_path: Path, cluster: NoCluster) -> None:
    with pytest.raises(JobError, match="no run to resume"):
        submit(tmp_path, resume=True)
    assert not (tmp_path / JOB).exists()


def test_a_resume_uses_the_current_spec_and_keeps_the_token(
    tmp_path: Path, cluster: NoCluster
) -> None:
    run_dir = submit(tmp_path).run_dir
    token = run_dir.token.read_text()
    limits = ("resilience.hang_timeout=33", "resilience.checkpoint_timeout=44")
    again = submit(tmp_path, "train.steps=99", *limits, resume=True)
    assert again.known == 1
    _, job = events(tmp_path)
    assert isinstance(job, JobSubmitted)
    assert (job.resume, job.steps) == (True, 99)
    assert (job.hang_timeout, job.checkpoint_timeout) == (33.0, 44.0)
    assert (job.plan_number, job.launch.launch) == (2, 2)
    second = json.loads(run_dir.trainer_config(2).read_text())
    assert (second["train"]["steps"], second["pause_s"]) == (99, 44.0)
    assert json.loads(run_dir.trainer_config(1).read_text())["train"]["steps"] == 24
    assert "steps: 99" in run_dir.spec_of(2).read_text()
    assert current_spec(run_dir) == run_dir.spec_of(2)
    assert "steps: 24" in run_dir.spec.read_text(), "until the ranks train by the new one"
    assert run_dir.token.read_text() == token


def test_new_ends_the_old_run_and_keeps_its_files(tmp_path: Path, cluster: NoCluster) -> None:
    run_dir = submit(tmp_path).run_dir
    token = run_dir.token.read_text()
    submit(tmp_path, new=True)
    assert [launch.launch for launch in cluster.cleared] == [1]
    (kept,) = (tmp_path / ".archive").iterdir()
    assert kept.name.startswith("e2e-2027")
    assert (kept / "journal.jsonl").exists()
    assert (kept / "token").read_text() == token != run_dir.token.read_text()
    assert len(events(tmp_path)) == 1
    assert [job.path.name for job in jobs(tmp_path)] == [JOB]


def test_a_new_job_does_not_use_checkpoints_without_a_journal(
    tmp_path: Path, cluster: NoCluster
) -> None:
    """For example in a folder that was half removed, or from another program."""
    run_dir = submit(tmp_path).run_dir
    run_dir.journal.unlink()
    (run_dir.checkpoints / "step-20").mkdir(parents=True)
    for resume in (False, True):
        with pytest.raises(JobError, match=r"has checkpoints but no journal\.jsonl") as refused:
            submit(tmp_path, resume=resume)
        assert "--new moves the folder to .archive/" in refused.value.fix
    submit(tmp_path, new=True)
    assert not run_dir.checkpoints.exists()


def test_new_without_an_old_run_is_a_plain_submission(tmp_path: Path, cluster: NoCluster) -> None:
    submit(tmp_path, new=True)
    assert not (tmp_path / ".archive").exists()


def test_a_run_root_without_write_access_is_reported_with_a_fix(
    tmp_path: Path, cluster: NoCluster
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendError, match="cannot write") as refused:
        submit(tmp_path / "file")
    assert "--run-root" in refused.value.fix


def test_after_a_refusal_of_the_backend_the_job_can_be_resumed(
    tmp_path: Path, cluster: NoCluster
) -> None:
    cluster.broken = True
    with pytest.raises(BackendError, match="no cluster today"):
        submit(tmp_path)
    cluster.broken = False
    submit(tmp_path, resume=True)
    assert [launch.launch for launch in cluster.submitted] == [2]


@pytest.mark.parametrize(
    "text", ["kill:rank=4@step=5", "kill:host=2@step=5", "kill:rank=0@step=25"]
)
def test_an_impossible_drill_is_refused(tmp_path: Path, cluster: NoCluster, text: str) -> None:
    with pytest.raises(DrillError, match="can never happen: the job has"):
        submit(tmp_path, drills=(drill(text),))
    assert not (tmp_path / JOB).exists()
    submit(tmp_path, drills=(drill("kill:rank=3@step=24"),))


def test_all_impossible_drills_are_named_at_once_and_before_a_dry_run(
    tmp_path: Path, cluster: NoCluster
) -> None:
    drills = tuple(map(drill, ("kill:rank=4@step=5", "kill:rank=0@step=2", "kill:host=2@step=5")))
    with pytest.raises(DrillError) as refused:
        submit_job.dry_run(submission(tmp_path, drills=drills), {}, TurnedClock())
    assert [line.split()[1] for line in refused.value.message.splitlines()] == [
        "kill:rank=4@step=5",
        "kill:host=2@step=5",
    ]


def test_an_unsupported_model_is_refused_before_anything_is_written(
    tmp_path: Path, cluster: NoCluster
) -> None:
    mixtral = (
        '{"model_type": "mixtral", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,'
        ' "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}'
    )
    with pytest.raises(PlanError, match="the bundled trainer cannot train mixtral"):
        submit(tmp_path, "model.preset=null", f"model.config={mixtral}")
    assert not any(tmp_path.iterdir())
    assert not cluster.submitted


def test_an_invalid_config_is_named_with_the_option_that_has_it(
    tmp_path: Path, cluster: NoCluster
) -> None:
    edits = ("model.preset=null", "model.config={model_type: opt, hidden_size: -1}")
    with pytest.raises(PlanError) as refused:
        submit(tmp_path, *edits)
    assert refused.value.message.splitlines() == [
        "--set model.config: the model's config is invalid:",
        "  hidden_size must be a whole number, at least 1, got -1",
    ]


def test_a_dry_run_shows_the_configuration_and_what_would_be_started(
    tmp_path: Path, cluster: NoCluster
) -> None:
    shown = submit_job.dry_run(submission(tmp_path), {}, TurnedClock()).text
    assert '"micro_batch_size"' in shown
    assert "2 agents would be started\n" in shown
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_is_refused_as_the_submission_and_shows_its_launch(
    tmp_path: Path, cluster: NoCluster
) -> None:
    with pytest.raises(JobError, match="has no run to resume"):
        submit_job.dry_run(submission(tmp_path, resume=True), {}, TurnedClock())
    submit(tmp_path)
    before = {path: path.stat().st_size for path in tmp_path.rglob("*")}
    for asks in (True, False):
        with pytest.raises(JobError, match=f"job {JOB} already exists in "):
            submit_job.dry_run(submission(tmp_path), {}, TurnedClock(), asks=asks)
    again = submit_job.dry_run(submission(tmp_path, resume=True), {}, TurnedClock()).text
    assert "launch 2: 2 agents would be started\n" in again
    anew = submit_job.dry_run(submission(tmp_path, new=True), {}, TurnedClock()).text
    assert "launch 1: 2 agents would be started\n" in anew
    assert {path: path.stat().st_size for path in tmp_path.rglob("*")} == before


def test_for_an_unknown_job_the_known_jobs_are_named(tmp_path: Path, cluster: NoCluster) -> None:
    with pytest.raises(JobError, match=r"no job 'nope' in .*; existing jobs: none"):
        find_job(tmp_path / "nowhere", "nope")
    submit(tmp_path)
    assert find_job(tmp_path, JOB).path == tmp_path / JOB
    with pytest.raises(JobError, match="existing jobs: e2e"):
        find_job(tmp_path, "nope")


def test_cancelling_a_job_without_a_leader_ends_it_in_the_journal(
    tmp_path: Path, cluster: NoCluster
) -> None:
    run_dir = submit(tmp_path).run_dir
    lead(tmp_path)
    cluster.held = "Slurm job 12 is PENDING"
    said = cancel_job.cancel(run_dir, {}, TurnedClock())
    assert said == "e2e was cancelled without a leader; Slurm job 12 was ended"
    assert [launch.launch for launch in cluster.cleared] == [1]
    cluster.held = None
    run = fold(events(tmp_path))
    assert (run.state, run.stage.title) == ("CANCELLED", "ended")
    assert "e2e: CANCELLED, cancelled by" in cancel_job.wait_until_ended(run_dir, {}, TurnedClock())
    with pytest.raises(JobError, match="already ended: CANCELLED"):
        cancel_job.cancel(run_dir, {}, TurnedClock())


def test_the_end_of_a_job_without_a_leader_has_its_last_step(
    tmp_path: Path, cluster: NoCluster
) -> None:
    run_dir = submit(tmp_path).run_dir
    lead(tmp_path)
    run_dir.metrics.write_text('{"attempt":1,"step":93,"time":7.0}\n')
    cancel_job.cancel(run_dir, {}, TurnedClock(), by="ann")
    end = events(tmp_path)[-1]
    assert isinstance(end, CancelRequested)
    assert (end.by, end.led, end.reached) == ("ann", False, Reached(attempt=1, step=93, at=7.0))


@pytest.mark.parametrize("starting", [True, False])
def test_a_job_that_has_not_started_is_cancelled_without_a_lost_leader(
    tmp_path: Path, cluster: NoCluster, starting: bool
) -> None:
    """Also if its leader already holds the journal but has not written its address yet."""
    run_dir = submit(tmp_path).run_dir
    with ExitStack() as held:
        if starting:
            held.enter_context(written(run_dir.journal))
            cluster.on_clear = held.close
        said = cancel_job.cancel(run_dir, {}, TurnedClock())
    assert said.startswith("e2e was cancelled before its leader started")
    assert [launch.launch for launch in cluster.cleared] == [1]
    end = events(tmp_path)[-1]
    assert isinstance(end, CancelRequested)
    assert (end.asked_at is not None) is starting
    assert fold(events(tmp_path)).state == "CANCELLED"


class UnreachableScheduler(NoCluster):
    """A scheduler whose queries fail."""

    def standing(self, launch: LaunchPlan) -> str | None:
        raise Unanswered("Slurm does not answer `squeue`", fix="wait")


@pytest.mark.parametrize("led", [True, False])
def test_the_end_of_a_job_is_written_even_if_its_scheduler_is_unreachable(
    tmp_path: Path, cluster: NoCluster, monkeypatch: pytest.MonkeyPatch, led: bool
) -> None:
    run_dir = submit(tmp_path).run_dir
    monkeypatch.setattr(
        "orchestrator.backends.by_name.implementation_named", lambda *_: UnreachableScheduler()
    )
    if led:
        lead(tmp_path, CancelRequested(at=1.0, by="me"))
    with pytest.raises(Unanswered) as failed:
        (cancel_job.wait_until_ended if led else cancel_job.cancel)(run_dir, {}, TurnedClock())
    assert failed.value.exit_code == exit_codes.BACKEND
    assert str(failed.value) == (
        "e2e is recorded as CANCELLED, but its scheduler was not reached and may still have"
        " Slurm job 12: Slurm does not answer `squeue`\n  fix: when the scheduler is reachable, run"
        f" `ndctl cancel e2e --run-root {tmp_path}` to end what is left; if the job starts before"
        " that, it exits at once"
    )
    assert fold(events(tmp_path)).state == "CANCELLED"

    with pytest.raises(Unanswered, match="may still have Slurm job 12"):
        cancel_job.cancel(run_dir, {}, TurnedClock())
    status = status_of(run_dir)
    assert "Slurm job 12, whose end is not confirmed" in status
    again = f"ndctl cancel e2e --run-root {tmp_path}"
    assert f"next        to end what its scheduler may still have of it: {again}" in status
    monkeypatch.setattr("orchestrator.backends.by_name.implementation_named", lambda *_: cluster)
    cluster.held = "Slurm job 12 is PENDING"
    said = cancel_job.cancel(run_dir, {}, TurnedClock())
    assert said == (
        "e2e had already ended: CANCELLED; ended what its scheduler still had:"
        " Slurm job 12 is PENDING"
    )
    assert len(cluster.cleared) == 1
    assert "not confirmed" not in status_of(run_dir)


def test_a_leader_that_starts_during_a_cancellation_is_ended(
    tmp_path: Path, cluster: NoCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = submit(tmp_path).run_dir
    monkeypatch.setattr(cancel_job, "has_writer", lambda path: False)
    with ExitStack() as held:
        held.enter_context(written(run_dir.journal))
        cluster.on_clear = held.close
        said = cancel_job.cancel(run_dir, {}, TurnedClock())
    assert said == "e2e was cancelled before its leader started"
    assert [launch.launch for launch in cluster.cleared] == [1]


def test_an_unreachable_leader_may_write_the_end_when_its_scheduler_ends_it(
    tmp_path: Path, cluster: NoCluster
) -> None:
    """For example a leader in a pod, which is unreachable from outside the cluster."""
    run_dir = submit(tmp_path).run_dir
    with ExitStack() as held:
        held.enter_context(written(run_dir.journal))

        def end_it() -> None:
            held.close()
            lead(tmp_path, CancelRequested(at=1.0, by="the scheduler"))

        cluster.on_clear = end_it
        assert "its processes were told to end" in cancel_job.cancel(run_dir, {}, TurnedClock())
    assert sum(isinstance(event, CancelRequested) for event in events(tmp_path)) == 1


def test_an_empty_journal_has_no_job_to_cancel(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / JOB)
    run_dir.path.mkdir()
    run_dir.journal.touch()
    with pytest.raises(JobError, match="did not finish"):
        cancel_job.cancel(run_dir, {}, TurnedClock())


WISH = ProfileWish(ranks=(0, 5), steps=2, wait_s=9.0)


@contextmanager
def leader(run_dir: RunDir, secret: str, launch: int = 1) -> Iterator[list[str]]:
    """A server like the leader's, with this secret; the users who asked it to cancel."""
    heard: list[str] = []

    async def listen(register: Register, ws: Line) -> None:
        raise AssertionError("no agent comes")

    async def no_ranks() -> RankStacks:
        raise JobError("no ranks run now: training, as ordered")

    async def no_profile(wish: ProfileWish) -> RankProfiles:
        assert wish == WISH
        raise JobError("it has no rank 5: its ranks are 0 to 1")

    async def serve() -> None:
        questions = Questions(stacks=no_ranks, profiles=no_profile)
        reception = LeaderServer(secret_from(secret), 1, listen, heard.append, questions)
        port = await reception.open("127.0.0.1", 0, run_dir.path)
        announce(run_dir, Term(launch), "127.0.0.1", port)
        ready.set()
        await over.wait()
        await reception.close()

    ready, loop = threading.Event(), asyncio.new_event_loop()
    over = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(10)
    try:
        with written(run_dir.journal):
            yield heard
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
        loop.close()


@pytest.mark.parametrize("proxy", ["", "http://127.0.0.1:9"])
def test_a_leader_is_asked_to_cancel(
    tmp_path: Path, cluster: NoCluster, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    """The connection ignores the proxy of the environment, because a proxy cannot reach a node."""
    monkeypatch.setenv("https_proxy", proxy)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    run_dir = submit(tmp_path).run_dir
    with leader(run_dir, run_dir.token.read_text()) as heard:
        assert "cancelling " in cancel_job.cancel(run_dir, {}, TurnedClock())
    assert heard == [cancel_job.user()]
    assert cluster.cleared == []


def test_a_leader_that_refuses_to_cancel_is_an_error(tmp_path: Path, cluster: NoCluster) -> None:
    """The server has the certificate of the job, but another key."""
    run_dir = submit(tmp_path).run_dir
    mine, _, pem = run_dir.token.read_text().partition("\n")
    with leader(run_dir, f"{mine}x\n{pem}") as heard:
        with pytest.raises(BackendError, match="refused to cancel: 401"):
            cancel_job.cancel(run_dir, {}, TurnedClock())
        assert heard == []


def test_another_program_on_the_leaders_port_receives_no_request(
    tmp_path: Path, cluster: NoCluster
) -> None:
    run_dir = submit(tmp_path).run_dir
    with leader(run_dir, draw()) as heard:
        # The lock is held by this test, so what is recorded comes after its patience is over.
        with pytest.raises(JobError, match="written by another process"):
            cancel_job.cancel(run_dir, {}, TurnedClock())
        assert heard == []


def test_the_address_of_the_leader_of_an_earlier_launch_is_not_used(
    tmp_path: Path, cluster: NoCluster
) -> None:
    run_dir = submit(tmp_path).run_dir
    with leader(run_dir, run_dir.token.read_text(), launch=7) as heard:
        # The lock is held by this test, so what is recorded comes after its patience is over.
        with pytest.raises(JobError, match="written by another process"):
            cancel_job.cancel(run_dir, {}, TurnedClock())
        assert heard == []
    assert len(cluster.cleared) == 1


def test_waiting_for_the_end_notices_a_lost_leader(tmp_path: Path, cluster: NoCluster) -> None:
    run_dir = submit(tmp_path).run_dir
    with pytest.raises(JobError, match="died before the job ended"):
        cancel_job.wait_until_ended(run_dir, {}, TurnedClock())


def test_waiting_for_the_end_reads_the_journal_once_more_after_the_leader_exits(
    tmp_path: Path, cluster: NoCluster
) -> None:
    run_dir = submit(tmp_path).run_dir

    class Ends(TurnedClock):
        """During the wait, the leader ends the job and exits."""

        def sleep(self, seconds: float) -> None:
            lead(tmp_path, CancelRequested(at=self.now(), by="me"))

    assert cancel_job.wait_until_ended(run_dir, {}, Ends()) == "e2e: CANCELLED, cancelled by me"


def test_a_cancelled_job_whose_saves_fail_says_what_is_lost(
    tmp_path: Path, cluster: NoCluster
) -> None:
    run_dir = RunDir(tmp_path / JOB)
    run_dir.path.mkdir()
    why = "No space left on device"
    failed = CheckpointFailed(at=START + 40, attempt=2, step=30, why=why)
    happened = [*recovered(), failed, replace(failed, step=35)]
    run_dir.journal.write_bytes(b"".join(map(to_line, journal(happened))))
    run_dir.metrics.write_text('{"attempt": 2, "step": 44, "time": 1.0}\n')
    assert at_risk(run_dir) == (
        "the last 2 saves failed (No space left on device); if they cannot save now either, a"
        " resume starts from step-20 and repeats 24 steps"
    )
    happened.append(CancelRequested(at=START + 50, by="me", led=False))
    run_dir.journal.write_bytes(b"".join(map(to_line, journal(happened))))
    assert cancel_job.wait_until_ended(run_dir, {}, TurnedClock()) == (
        "e2e: CANCELLED, cancelled by me; the last 2 saves failed (No space left on device); a"
        " resume starts from step-20 and repeats 24 steps"
    )


def test_a_job_that_the_scheduler_still_has_is_not_submitted_again(
    cluster: NoCluster, tmp_path: Path
) -> None:
    submit_job.submit(submission(tmp_path), {}, TurnedClock())
    cluster.held = "Slurm job 12 is PENDING (Resources)"
    for again in (submission(tmp_path), submission(tmp_path, resume=True)):
        with pytest.raises(JobError, match=r"Slurm job 12 is PENDING \(Resources\)") as failed:
            submit_job.submit(again, {}, TurnedClock())
        assert "ndctl cancel e2e" in failed.value.fix
    submit_job.submit(submission(tmp_path, new=True), {}, TurnedClock())
    assert (len(cluster.submitted), len(cluster.cleared)) == (2, 1)


def test_problems_are_reported_before_anything_is_written(
    cluster: NoCluster, tmp_path: Path
) -> None:
    cluster.obstacle = "partition: must be one of train"
    with pytest.raises(BackendError, match="must be one of train"):
        submit_job.submit(submission(tmp_path), {}, TurnedClock())
    assert not (tmp_path / "e2e").exists()
    tried = submit_job.dry_run(submission(tmp_path), {}, TurnedClock())
    assert '"micro_batch_size"' in tried.text
    assert "must be one of train" in str(tried.refused)


def test_a_dry_run_shows_the_answer_of_the_scheduler(cluster: NoCluster, tmp_path: Path) -> None:
    tried = submit_job.dry_run(submission(tmp_path), {}, TurnedClock())
    assert tried.refused is None
    assert tried.text.endswith("\n# it would start: at noon\n# hosts: 2 are there\n#   fix: wait")


def test_a_dry_run_without_a_scheduler_shows_no_answer(cluster: NoCluster, tmp_path: Path) -> None:
    cluster.obstacle = "partition: must be one of train"
    tried = submit_job.dry_run(submission(tmp_path), {}, TurnedClock(), asks=False)
    assert tried.refused is None
    assert tried.text.endswith("2 agents would be started")


def test_reasons_for_waiting_are_reported_without_stopping_the_job(
    cluster: NoCluster, tmp_path: Path
) -> None:
    submitted = submit_job.submit(submission(tmp_path), {}, TurnedClock())
    assert submitted.warnings == ("hosts: 2 are there\n  fix: wait",)
    assert len(cluster.submitted) == 1


def test_on_slurm_the_number_of_hosts_includes_the_spares(tmp_path: Path) -> None:
    from msgspec.structs import replace

    found = submission(tmp_path)
    spec = found.planned.spec
    cluster = replace(spec.cluster, backend="slurm", spare_hosts=1)
    on_slurm = replace(found, planned=replace(found.planned, spec=replace(spec, cluster=cluster)))
    launch = payload.launch_of(on_slurm, 3)
    assert launch.hosts == tuple(f"node-{i}" for i in range(len(launch.hosts)))
    assert len(launch.hosts) == len(found.planned.plan.hosts) + 1
    assert launch.slurm == cluster.slurm
    assert payload.launch_of(found, 3).slurm is None


def test_the_scheduler_is_asked_only_without_a_leader(cluster: NoCluster, tmp_path: Path) -> None:
    from orchestrator.journal.journal import read

    submitted = submit_job.submit(submission(tmp_path), {}, TurnedClock())
    run = fold(entry.event for entry in read(submitted.run_dir.journal))
    assert run.job is not None
    from msgspec.structs import replace

    queued = replace(run, job=replace(run.job, backend="slurm"))
    over = replace(queued, stage=Ended(since=0.0, reason="", ending="FAILED"))

    def said(*jobs: tuple[Run, bool], quiet: bool = False) -> list[tuple[str | None, bool]]:
        found = schedulers.statuses_at_schedulers(
            [(*job, quiet) for job in jobs], {}, TurnedClock()
        )
        return [(one.words, one.held) for one in found]

    assert said((run, False)) == [(None, False)], "of local jobs"
    assert said((queued, True), (over, False)) == [("Slurm job 12", False)] * 2
    assert cluster.asked == 0
    cluster.held = "Slurm job 12 is PENDING"
    waits = (cluster.held, True)
    assert said((queued, False), (run, False), (queued, False)) == [waits, (None, False), waits]
    assert cluster.asked == 1, "about all jobs at once"
    assert said((queued, True), quiet=True) == [(cluster.held, False)], "it may be stopped"
    granted = Allocation(id="12", restarts=0, hosts=("h-0",), successor_s=600.0)
    leader = LeaderStarted(at=1.0, host="h-0", pid=1, allocation=granted)
    short = fold([leader], queued)
    assert said((short, True)) == [(cluster.held, False)], "the scheduler knows what it lacks"


@pytest.mark.parametrize(
    ("says", "error", "fix"),
    [
        (
            LaunchStatus("Slurm job 12 is PENDING (Resources)", held=True),
            "job e2e has no ranks yet: PENDING, Slurm job 12 is PENDING (Resources)",
            "try again when `ndctl status e2e` says that it runs",
        ),
        (
            LaunchStatus("Slurm job 12 is SUSPENDED", held=True, resume="scontrol resume 12"),
            "the ranks of e2e are stopped: SUSPENDED, Slurm job 12 is SUSPENDED",
            "to continue it: scontrol resume 12",
        ),
        (
            LaunchStatus("Slurm job 12 has ended: CANCELLED", held=False, over="CANCELLED"),
            "job e2e is not running: CANCELLED, Slurm job 12 has ended: CANCELLED",
            "`ndctl logs e2e` has its output",
        ),
    ],
)
def test_the_scheduler_knows_why_no_leader_answers(
    tmp_path: Path, cluster: NoCluster, says: LaunchStatus, error: str, fix: str
) -> None:
    run_dir = submit(tmp_path).run_dir
    on_slurm(tmp_path)
    cluster.says = says
    with pytest.raises(JobError) as refused:
        rank_stacks(Found(run_dir), {}, TurnedClock())
    assert (refused.value.message, refused.value.fix) == (error, fix)


def test_a_leader_without_ranks_and_a_leader_that_is_gone_are_told(
    tmp_path: Path, cluster: NoCluster
) -> None:
    run_dir = submit(tmp_path).run_dir
    with (
        leader(run_dir, run_dir.token.read_text()),
        pytest.raises(JobError, match="job e2e: no ranks run now: training, as ordered"),
    ):
        rank_stacks(Found(run_dir), {}, TurnedClock())
    with (
        leader(run_dir, run_dir.token.read_text()),
        pytest.raises(JobError, match="job e2e: it has no rank 5: its ranks are 0 to 1"),
    ):
        rank_profiles(Found(run_dir), {}, TurnedClock(), WISH)
    with pytest.raises(BackendError, match="could not be reached from here; the job is SUBMITTED"):
        rank_profiles(Found(run_dir), {}, TurnedClock(), WISH)
    with pytest.raises(BackendError, match="could not be reached from here; the job is SUBMITTED"):
        rank_stacks(Found(run_dir), {}, TurnedClock())
    lead(tmp_path, CancelRequested(at=1.0, by="me"))
    with pytest.raises(JobError, match="job e2e is not running: CANCELLED"):
        rank_stacks(Found(run_dir), {}, TurnedClock())
    with pytest.raises(JobError, match="job e2e is not running: CANCELLED"):
        rank_profiles(Found(run_dir), {}, TurnedClock(), WISH)
