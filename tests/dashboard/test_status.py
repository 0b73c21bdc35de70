import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from orchestrator.contract.files.checkpoint_names import SkippedCheckpoint
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import Allocation
from orchestrator.contract.messages.actions import (
    Action,
    CheckHosts,
    EndJob,
    JudgeHang,
    ReplaceAgent,
    Replan,
    Requeue,
    SaveCheckpoint,
    StartAttempt,
)
from orchestrator.contract.messages.events import (
    AgentLost,
    CancelRequested,
    CheckpointFailed,
    CheckpointIntervalChanged,
    CheckpointSaved,
    CheckpointSlow,
    Event,
    EvidenceGathered,
    HangJudged,
    HangOver,
    HealthChanged,
    HostFlagged,
    HostLeaving,
    HostOpened,
    HostsChecked,
    HostStopped,
    HostUnavailable,
    HostWarned,
    JobSubmitted,
    JournalDelayed,
    LeaderStarted,
    LeaveAsked,
    LogGrew,
    MemoryCheckpointsSet,
    NoticeSent,
    ProgramRuns,
    RankError,
    RankEvidence,
    RankExited,
    Replanned,
    ReplanRefused,
    RequeueRefused,
    RunDirLost,
    StragglerGone,
    Tick,
    TrainingResumed,
)
from orchestrator.contract.plan import Memory
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
from orchestrator.contract.spec.run_spec import RunSpec
from orchestrator.contract.spec.slurm_spec import SlurmSpec
from orchestrator.contract.visible import visible
from orchestrator.dashboard.command_hints import Commands
from orchestrator.dashboard.describe import _stacks, describe_json, describe_text
from orchestrator.dashboard.event_text import (
    describe_action,
    describe_event,
    event_line,
    memory_use,
    sort_by_time,
)
from orchestrator.dashboard.follow.follow import summary_text
from orchestrator.dashboard.format import date_time
from orchestrator.dashboard.metrics import Metric, Progress, fold_metrics
from orchestrator.dashboard.screen.screen import draw
from orchestrator.dashboard.snapshot import Snapshot, is_full, read_snapshot
from orchestrator.dashboard.status import action_taken, stale_reasons, status_json, status_text
from orchestrator.diagnosis.classes import default_rules
from orchestrator.job.failures.incident_records import left_out
from orchestrator.journal.journal import Entry, Journal
from orchestrator.seams import LaunchStatus
from tests.dashboard.dashboard_story import (
    HOSTS,
    SLOW,
    START,
    StoryClock,
    arrivals,
    broken,
    finished,
    hang_judged,
    hung,
    journal,
    killed,
    metrics,
    recovered,
    restarting,
    seen_of,
    silent_program,
    started,
    submitted,
    waiting_for_a_host,
)
from tests.read_events import as_read

SAVE_FAILED = as_read(
    CheckpointFailed(
        at=START, attempt=1, step=20, why="rank 3: No space left on device: /c (0.1 MiB free)"
    )
)


def snapshot(
    events: Iterable[Event],
    lines: Sequence[Metric] = (),
    *,
    now: float = START + 40,
    alive: bool = True,
) -> Snapshot:
    return Snapshot(
        run_dir=RunDir(Path("/runs/quickstart")),
        seen=seen_of(events),
        progress=fold_metrics(Progress(), lines),
        leader_alive=alive,
        now=now,
    )


def test_status_json_has_all_documented_keys() -> None:
    body = status_json(snapshot(recovered(), metrics(1, 24, attempt=2)))
    assert {
        "name",
        "state",
        "backend",
        "attempt",
        "restarts",
        "step",
        "steps",
        "loss",
        "tokens_per_second",
        "hosts",
        "world_size",
        "mesh",
        "incidents",
        "checkpoint",
        "reason",
        "run_dir",
        "since",
        "measured",
    } <= set(body)
    assert (body["name"], body["state"], body["attempt"], body["restarts"]) == (
        "quickstart",
        "RUNNING",
        2,
        1,
    )
    assert (body["step"], body["steps"], body["world_size"]) == (24, 60, 4)
    assert body["mesh"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2}
    assert body["hosts"] == ["host-0", "host-1"]
    assert body["checkpoint"]["name"] == "step-20"
    assert body["ignored_events"] == {}
    assert json.loads(json.dumps(body, allow_nan=False)) == body


def test_the_number_of_unexpected_events_is_shown() -> None:
    asked = RequeueRefused(at=START + 39, why="no")
    shot = snapshot([*recovered(), asked, asked])
    assert status_json(shot)["ignored_events"] == {"RequeueRefused in Running": 2}
    (line,) = [line for line in describe_text(shot, UTC).splitlines() if "please report" in line]
    assert line.split(maxsplit=2) == [
        "2",
        "times",
        "RequeueRefused in Running: this cannot happen, please report it",
    ]


def test_a_failed_save_is_a_warning_in_text_and_json() -> None:
    seen = snapshot([*started(), SAVE_FAILED])
    why = SAVE_FAILED.why
    checkpoint = status_json(seen)["checkpoint"]
    assert (checkpoint["step"], checkpoint["failed"]["why"]) == (None, why)
    text = describe_text(seen, UTC)
    assert f"none yet; warning: the save at step 20 failed: {why}" in text
    assert f"  warning     the save at step 20 failed at {date_time(START, UTC)}:" in text
    line = event_line(Entry(seq=1, event=SAVE_FAILED, actions=()), UTC)
    assert line.endswith(f"warning: failed to save the checkpoint of step 20: {why}")


def test_failing_checkpoints_are_shown_with_the_risk_and_advice() -> None:
    seen = snapshot(
        [*started(), SAVE_FAILED, replace(SAVE_FAILED, at=START + 20, step=40)], metrics(1, 47)
    )
    (said,) = labelled("next", status_text(seen, UTC))
    assert SAVE_FAILED.reading is not None
    assert said == (
        f"{SAVE_FAILED.reading.advice}: saving checkpoints to {seen.checkpoints} fails since"
        " 2023-11-14 22:13:20 UTC; none is complete yet; 47 steps of work at risk; to watch:"
        " ndctl dashboard quickstart"
    )
    assert "(2 failed saves in a row since 2023-11-14 22:13:20 UTC)" in describe_text(seen, UTC)
    saved = CheckpointSaved(at=START + 21, attempt=1, step=44)
    seen = snapshot([*started(), saved, SAVE_FAILED], metrics(1, 47))
    (said,) = labelled("next", status_text(seen, UTC))
    assert "the last complete one is step-44; 3 steps of work at risk" in said
    later = replace(SAVE_FAILED, at=START + 22, step=90)
    (said,) = labelled("next", status_text(snapshot([*started(), saved, later]), UTC))
    assert "46 steps of work at risk" in said, "metrics lie on the same full disk"
    unknown = as_read(replace(SAVE_FAILED, why="rank 3: the moon is full"))
    (said,) = labelled("next", status_text(snapshot([*started(), unknown]), UTC))
    assert said.startswith("fix the cause: saving checkpoints to ")


def test_a_late_step_is_told_and_no_time_is_promised_after_the_last_one() -> None:
    """All steps are done, and the ranks hang in the last save."""
    done = metrics(50, 60)
    just = snapshot(started(), done, now=START + 56 + 1)
    assert "last step" not in status_text(just, UTC)
    assert labelled("next", status_text(just, UTC)) == [
        "no action needed; to watch: ndctl dashboard quickstart"
    ]
    late = snapshot(started(), done, now=START + 56 + 95)
    (progress,) = labelled("progress", status_text(late, UTC))
    assert progress.endswith("last step 1 min 35 s ago")
    assert (status_json(just)["eta_s"], status_json(late)["eta_s"]) == (None, None)
    assert labelled("next", status_text(late, UTC)) == [
        "1 min 35 s since the last step; to see what the ranks do: ndctl snapshot quickstart"
    ]


def test_a_program_that_seldom_reports_a_step_is_not_late() -> None:
    seldom = [
        replace(one, step=100 * one.step, time=START + 30 * one.step) for one in metrics(1, 3)
    ]
    seen = snapshot(started(), seldom, now=START + 90 + 60)
    assert "last step" not in status_text(seen, UTC)


def test_a_full_disk_is_told_because_its_leader_can_record_nothing() -> None:
    def on_full_disk(events: Iterable[Event]) -> Snapshot:
        return replace(snapshot(events), disk_is_full=True)

    for events in (started(), broken()):
        (said,) = labelled("next", status_text(on_full_disk(events), UTC))
        assert said.startswith(
            "free disk space: the disk of /runs/quickstart is full, so the leader"
        )
    (said,) = labelled("next", status_text(on_full_disk([*started(), SAVE_FAILED]), UTC))
    assert SAVE_FAILED.reading is not None
    assert said.startswith(SAVE_FAILED.reading.advice)
    (said,) = labelled("next", status_text(on_full_disk(finished()), UTC))
    assert "disk" not in said


@pytest.mark.parametrize(("backend", "full"), [("slurm", True), ("kubernetes", False)])
def test_only_the_disk_of_the_leader_counts(
    backend: str, full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run directory of a job on Kubernetes may be a copy on this machine."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    job = seen_of([submitted(backend=backend)]).run
    assert is_full(RunDir(tmp_path), job) is full


def test_an_incident_in_json_has_all_documented_keys() -> None:
    (incident,) = status_json(snapshot(recovered()))["incidents"]
    assert {
        "id",
        "at",
        "kind",
        "cause",
        "culprit",
        "evidence",
        "action",
        "detected_after_s",
        "recovered_after_s",
        "drill",
    } <= set(incident)
    assert incident["culprit"] == {"host": "host-0", "rank": 1}
    assert incident["recovered_after_s"] == 7.0
    assert incident["drill"] == "kill:rank=1@step=25"
    assert incident["evidence"]["signal"] == "SIGKILL"


def test_nothing_is_known_before_the_first_step() -> None:
    body = status_json(snapshot([submitted()], now=START + 1))
    assert (body["loss"], body["checkpoint"], body["step"]) == (None, None, 0)


def test_a_job_without_leader_is_reported_failed() -> None:
    body = status_json(snapshot(recovered(), alive=False))
    assert body["state"] == "FAILED"
    assert body["reason"].startswith("the leader on host-0 died without recording a reason")
    assert body["fix"] == "ndctl submit /runs/quickstart/spec.yaml --resume"


CANCELLED: list[Event] = [submitted(), CancelRequested(at=START + 1, by="ada")]


def stopped_by_ada() -> list[Event]:
    hosts = ("host-0", "host-1")
    stopped = [HostStopped(at=START + 31, attempt=1, host=one, finished=False) for one in hosts]
    return [CancelRequested(at=START + 30, by="ada"), *stopped]


ERROR = RankError(error="ValueError", message="boom", step=10, traceback="Trace\n  boom")


def raised(attempt: int, at: float) -> RankExited:
    return RankExited(
        at=at,
        attempt=attempt,
        rank=1,
        host="host-0",
        exit_code=1,
        signal=None,
        step=9,
        stopped=False,
        detected_after_s=0.1,
        error=ERROR,
        log_tail=("ValueError: boom",),
    )


def failed() -> list[Event]:
    """A job that fails after the same exception in two attempts."""
    events: list[Event] = [*started()]
    for attempt in (1, 2):
        at = START + 20 * attempt
        events.append(raised(attempt, at))
        events += [
            HostStopped(at=at + 1, attempt=attempt, host=host, finished=False)
            for host in ("host-0", "host-1")
        ]
    return events


@pytest.mark.parametrize(
    ("shot", "said"),
    [
        (
            snapshot([submitted()], now=START + 1),
            "wait for the leader to start; if it does not: ndctl logs quickstart --agents",
        ),
        (snapshot(started()[:3]), "wait: 1 of 2 hosts registered"),
        (snapshot(started()), "ndctl dashboard quickstart"),
        (snapshot(broken()), "ndctl is recovering it"),
        (snapshot(recovered(), alive=False), "ndctl submit /runs/quickstart/spec.yaml --resume"),
        (snapshot(finished(), alive=False), "ndctl describe quickstart"),
        (snapshot(CANCELLED, alive=False), "to start again from step 0: ndctl submit"),
        (
            snapshot(
                [*started(), CheckpointSaved(at=START + 25, attempt=1, step=20), *stopped_by_ada()],
                alive=False,
            ),
            "to resume from step-20: ndctl submit",
        ),
        (snapshot(failed(), alive=False), "ndctl submit /runs/quickstart/spec.yaml --resume"),
    ],
)
def test_status_ends_with_commands(shot: Snapshot, said: str) -> None:
    lines = status_text(shot, UTC).splitlines()
    assert said in lines[-1]
    assert 6 <= len(lines) <= 12


# The texts about a failed job


def labelled(label: str, text: str) -> list[str]:
    found = (line for line in text.splitlines() if line[:14].strip() == label)
    return [line[14:] for line in found if line]


def test_a_stop_is_shown_once_with_its_cause_and_the_log_command() -> None:
    seen = snapshot(failed(), alive=False)
    text = status_text(seen, UTC)
    why = (
        "rank 1 raised ValueError: boom at step 10: the same error twice, so the program has a bug"
    )
    assert text.startswith(f"quickstart: FAILED, {why}")
    assert text.count("the same error twice") == 1
    assert text.count("boom") == 1, "the incident does not repeat the cause"
    (done,) = labelled("ndctl did", text)
    assert done.startswith("stopped the job (rule repeated-error); ")
    # As a message, and the status of a job that was submitted again, say it.
    told = action_taken(seen.seen.run.history.incidents[-1], "")
    assert told == (
        "stopped the job: the same error twice, so the program has a bug (rule repeated-error)"
    )
    assert labelled("see why", text) == ["ndctl logs quickstart --rank 1 --attempt 2"]
    again = "fix the cause, then: ndctl submit /runs/quickstart/spec.yaml --resume"
    assert labelled("next", text) == [again]


def test_a_job_that_restarts_was_not_stopped() -> None:
    (incident,) = snapshot(restarting()).seen.run.history.incidents
    told = action_taken(incident, f"{incident.action}; in 10 s")
    assert told == "restart as attempt 2 from checkpoint step-20 (rule class-default)"


def diverged(**more: Any) -> list[Event]:
    error = RankError(error="NotFinite", message="the loss is nan", step=25, traceback="", since=23)
    return [
        *started(**more),
        CheckpointSaved(at=START + 25, attempt=1, step=20),
        as_read(replace(raised(1, START + 30), exit_code=79, error=error)),
        *(
            HostStopped(at=START + 31, attempt=1, host=host, finished=False)
            for host in ("host-0", "host-1")
        ),
    ]


def test_the_command_after_a_nan_loss_enables_a_rollback() -> None:
    whole = "ndctl submit /runs/quickstart/spec.yaml --resume --set resilience.on_nan=rollback"
    seen = snapshot(diverged(), alive=False)
    assert labelled("next", status_text(seen, UTC)) == [whole]
    assert labelled("", describe_text(seen, UTC))[-1] == whole


def test_the_command_after_out_of_memory_is_the_cheapest_alternative() -> None:
    error = RankError(
        error="OutOfMemoryError",
        message="CUDA out of memory. Tried to allocate 2.00 GiB.",
        step=10,
        traceback="",
    )
    job = submitted()
    plan = replace(job.plan, memory=Memory(peak_bytes=70 << 30, items={}), profile="h100-sxm-80gb")
    events = [
        replace(job, plan=plan),
        *started()[1:],
        as_read(replace(raised(1, START + 30), error=error)),
        *(
            HostStopped(at=START + 31, attempt=1, host=host, finished=False)
            for host in ("host-0", "host-1")
        ),
    ]
    asked = seen_of(events).run.plans.shortage
    assert asked is not None
    edits = ("--set train.micro_batch_size=1", "--set 'model.lora={quantize: nf4}'")
    refused = ReplanRefused(
        at=START + 32,
        hosts=2,
        why="resilience.on_oom is stop",
        device_bytes=asked.device_bytes,
        ways=tuple(f"{one}  (about 60 GiB)" for one in edits),
        edits=edits,
    )
    seen = snapshot([*events, refused], alive=False)
    commands = [f"ndctl submit /runs/quickstart/spec.yaml --resume {one}" for one in edits]
    text = status_text(seen, UTC)
    assert labelled("next", text) == commands[:1]
    assert text.count("out of memory") == 1
    assert labelled("", describe_text(seen, UTC))[-2:] == commands
    run = left_out(seen.seen.run, START + 32, "host-1", "no GPU answers")
    unfit = replace(seen, seen=replace(seen.seen, run=run))
    assert labelled("next", status_text(unfit, UTC)) == commands[:1]


def test_a_dead_leader_is_shown_with_the_command_for_its_log() -> None:
    seen = snapshot(recovered(), alive=False)
    assert "the leader on host-0 died" in status_text(seen, UTC).splitlines()[0]
    text = describe_text(seen, UTC)
    assert labelled("see why", text)[0] == "ndctl logs quickstart --agents --tail 20"
    assert labelled("leader log", text) == ["/runs/quickstart/logs/agent-host-0.log"]
    assert "agent-host-0.log" not in describe_text(snapshot(recovered()), UTC)


def test_a_slurm_job_that_no_agent_logged_refers_to_its_output_if_it_has_any(
    tmp_path: Path,
) -> None:
    run_dir = RunDir(tmp_path / "quickstart")
    run_dir.slurm.mkdir(parents=True)
    status = LaunchStatus("Slurm job 7 has ended: DEADLINE", held=False)
    seen = replace(snapshot([submitted()], alive=False), run_dir=run_dir, launch_status=status)
    assert seen.standing.state == "FAILED"
    assert labelled("see why", status_text(seen, UTC)) == [], "it never started"
    folder = run_dir.slurm / f"launch-{submitted().launch.launch}"
    folder.mkdir()
    (folder / "submission.sh").write_text("#!/bin/bash")
    (folder / "7-0_0_log.out").touch()
    (folder / "7_batch.out").write_text("module: not found")
    command = f"tail -n 20 {folder / '7_batch.out'}"
    assert labelled("see why", status_text(seen, UTC)) == [command]
    run_dir.logs.mkdir()
    run_dir.agent_log("host-0").touch()
    command = "ndctl logs quickstart --agents --tail 20"
    assert labelled("see why", status_text(seen, UTC)) == [command]


def test_an_incident_says_what_the_next_attempt_loaded_and_what_it_could_not() -> None:
    why = "the copy of rank 2 has changed since it was made"
    damaged = SkippedCheckpoint("step-23 in memory on host-1", why)
    resumed = TrainingResumed(
        at=START + 36, attempt=2, step=22, passed_over=(damaged,), in_memory=True
    )
    *earlier, _, first_step = recovered()
    events = [*earlier, resumed, first_step, CheckpointSaved(at=START + 60, attempt=2, step=40)]
    text = describe_text(snapshot(events), UTC)
    assert labelled("resumed", text) == ["from step 22 in the memory of the hosts"]
    assert labelled("skipped", text) == [f"{damaged.name}: {why}"]


def test_long_lines_of_logs_and_tracebacks_are_cut() -> None:
    long = replace(ERROR, message="m" * 4_000, traceback="Trace\n" + "  boom" * 2_000)
    story = [replace(raised(1, START + 10), error=long, log_tail=("l" * 3_000,))]
    stops = failed()[len(started()) + 1 :][:2]
    seen = snapshot([*started(), *story, *stops], alive=False)
    assert "traceback:" in describe_text(seen, UTC)
    for text in (status_text(seen, UTC), describe_text(seen, UTC), summary_text(seen, UTC)):
        assert max(map(len, text.splitlines())) < 700


def test_no_command_refers_to_an_empty_log(tmp_path: Path) -> None:
    seen = replace(snapshot(failed(), alive=False), run_dir=RunDir(tmp_path / "quickstart"))
    command = "ndctl logs quickstart --rank 1 --attempt 2"
    assert labelled("see why", status_text(seen, UTC)) == [command]
    logs = seen.run_dir.attempt_logs(2, "host-0")
    logs.mkdir(parents=True)
    (logs / "rank-1.log").touch()
    assert labelled("see why", status_text(seen, UTC)) == ["ndctl describe quickstart"]
    assert command not in describe_text(seen, UTC)


def test_all_views_show_the_speed_over_the_same_steps() -> None:
    """The last of these steps was eight times as fast as the others, which took 0.8 s each."""
    steps = [replace(one, tokens_per_second=1_280.0) for one in metrics(1, 9)]
    steps.append(replace(metrics(10, 10)[0], tokens_per_second=10_240.0, step_s=0.1))
    seen = snapshot(started(), steps, now=START + 17)
    assert "speed       0.8 s per step, 1,280 tokens/s" in describe_text(seen, UTC)
    assert ", 1,280 tokens/s" in labelled("progress", status_text(seen, UTC))[0]
    assert labelled("speed", summary_text(seen, UTC)) == ["1,280 tokens/s"]
    assert status_json(seen)["tokens_per_second"] == pytest.approx(1_280.0)


def test_describe_does_not_refer_to_itself() -> None:
    lost = AgentLost(at=START + 30, host="host-1", why="its connection closed", silent_s=2.0)
    events = [*started(max_restarts=0), lost]
    events.append(HostStopped(at=START + 31, attempt=1, host="host-0", finished=False))
    seen = snapshot(events, alive=False)
    assert seen.seen.run.state == "FAILED"
    assert labelled("see why", status_text(seen, UTC)) == ["ndctl describe quickstart"]
    assert "ndctl describe" not in describe_text(seen, UTC)


def test_each_incident_of_a_running_job_has_the_log_command_of_its_attempt() -> None:
    """Without `--attempt`, `ndctl logs` shows the newest attempt."""
    text = describe_text(snapshot(recovered()), UTC)
    assert "    see why   ndctl logs quickstart --rank 1 --attempt 1" in text
    assert not [one.name for one in default_rules() if re.search(r"\bJOB\b|--rank R", one.advice)]


def test_no_command_refers_to_a_removed_log() -> None:
    events = [replace(submitted(), keep_attempts=2), *recovered()[1:]]
    shot = snapshot(events)
    for newest, shown in ((2, True), (3, False)):
        run = replace(shot.seen.run, attempt=replace(shot.seen.run.attempt, number=newest))
        text = describe_text(replace(shot, seen=replace(shot.seen, run=run)), UTC)
        assert ("ndctl logs quickstart --rank 1 --attempt 1" in text) is shown


def test_every_command_names_the_run_root() -> None:
    """So that each command finds the job in the folder where the user typed the first one."""
    elsewhere = Commands(job="quickstart", spec="/my runs/s.yaml", root=("--run-root", "/my runs"))
    stories = [started(), recovered(), failed(), finished(), diverged(), CANCELLED]
    stories += [[submitted()], waiting_for_a_host(0), started(100, 8)]
    said = []
    for events, alive in product(stories, (True, False)):
        seen = replace(snapshot(events, alive=alive), known_by=elsewhere)
        text = f"{describe_text(seen, UTC)}\n{status_text(seen, UTC)}\n{summary_text(seen, UTC)}"
        shown = draw(seen.view, 200, 50, UTC).plain
        said += re.findall(r"ndctl (?:submit|status|describe|logs|cancel|dashboard) .*", text)
        said += re.findall(r"ndctl (?:describe|submit|cancel) .*", shown)
    assert len(said) > 50
    for command in said:
        assert "--run-root '/my runs'" in command, command


def test_a_job_without_enough_hosts_shows_one_line_with_commands() -> None:
    """The line says what is missing, since when, the retries so far, and when the next one is."""
    cancel = "to give up: ndctl cancel quickstart"
    fewer = "ndctl submit /runs/quickstart/spec.yaml --resume --set resilience.shrink=true"
    since = "wait: 1 of 2 hosts available since 2023-11-14 22:13:30 UTC"
    release = "if this does not change, ndctl releases all hosts at"
    requeue = f"and requeues the job; {cancel}; after that, to train with fewer hosts: {fewer}"
    (first,) = said_next(waiting_for_a_host(0), now=START + 40)
    assert first == f"{since} (30 s); {release} 2023-11-14 22:23:30 UTC {requeue}"
    (last,) = said_next(waiting_for_a_host(2), now=START + 2000)
    assert last == (
        f"{since} (33 min 10 s), all hosts released 2 times so far; {release}"
        f" 2023-11-14 23:23:50 UTC {requeue}"
    )
    # The second is a program of the user, for which `shrink` is refused.
    for more in ({"shrink": True}, {"run": RunSpec(script="train.py"), "steps": 0}):
        (shrinking,) = said_next(waiting_for_a_host(0, **more), now=START + 40)
        assert shrinking.endswith(cancel)


def said_next(events: Iterable[Event], now: float) -> list[str]:
    lines = status_text(snapshot(events, now=now), UTC).splitlines()
    return [line.removeprefix("  next        ") for line in lines if line.startswith("  next")]


def test_a_job_with_waiting_pods_shows_how_often_they_were_created_again() -> None:
    held = LaunchStatus("it waits", held=True)
    waits = replace(snapshot(waiting_for_a_host(2)[:-2], alive=False), launch_status=held)
    assert status_text(waits, UTC).splitlines()[-1].strip() == (
        "next        wait for hosts, since 2023-11-14 22:13:30 UTC, all hosts released 2 times so"
        " far; to give up: ndctl cancel quickstart"
    )


def test_status_names_hosts_with_problems() -> None:
    slow = HealthChanged(at=START + 20, attempt=1, ranks=((3, 3),), health="slow", age_s=4.0)
    assert "host-1: rank 3: late heartbeat" in status_text(snapshot([*started(), slow]), UTC)


def test_a_host_is_not_called_dead_because_its_rank_or_agent_ended() -> None:
    one_of_two = snapshot([*started(), raised(1, START + 20)])
    assert labelled("unhealthy", status_text(one_of_two, UTC)) == ["host-0: rank 1 exited"]
    lost = AgentLost(at=START + 30, host="host-1", why="silent", silent_s=10.0)
    silent = snapshot([*started(), lost])
    assert labelled("unhealthy", status_text(silent, UTC)) == ["host-1: its agent is lost"]
    text = describe_text(silent, UTC)
    assert "ranks 2-3: its agent is lost; agent pid" in text


SLOW_WORDS = "rank 3 takes 0.350 s of its own a step, its peers 0.100 s, which costs 300 tokens/s"


def test_a_warning_of_a_host_is_shown_with_what_ndctl_does_about_it() -> None:
    what = "GPU 0000:0f:00: uncorrected memory errors"
    warned = HostWarned(at=START + 20, host="host-1", problem="gpu-memory", what=what)
    seen = snapshot([*started(), warned])
    assert f"warning     host-1 warns: {what}" in status_text(seen, UTC)
    text = describe_text(seen, UTC)
    assert "Warnings of hosts" in text
    assert "not replaced: resilience.replace_warned is false" in text
    assert [one["host"] for one in status_json(seen)["warnings"]] == ["host-1"]


def test_a_straggler_is_named_with_its_cost() -> None:
    seen = snapshot([*started(), SLOW])
    assert f"straggler   host-1: {SLOW_WORDS}" in status_text(seen, UTC)
    assert status_json(seen)["stragglers"][0]["rank"] == 3
    text = describe_text(seen, UTC)
    assert SLOW_WORDS in text
    assert "over 15 steps of" in text
    assert "resilience.replace_stragglers is false" in text
    gone = StragglerGone(at=START + 30, attempt=1, rank=3, host="host-1", own_s=0.1, peers_s=0.1)
    assert "straggler" not in status_text(snapshot([*started(), SLOW, gone]), UTC)
    assert "Stragglers" not in describe_text(snapshot([*started(), SLOW, gone]), UTC)


def evidence() -> EvidenceGathered:
    ranks = tuple(
        RankEvidence(
            rank=rank,
            pid=1000 + rank,
            process_state="T" if rank == 3 else "S",
            step=12,
            phase="train",
            age_s=10.0,
            stack=() if rank == 3 else ("train.py:10 step", "main.py:3 main"),
        )
        for rank in (2, 3)
    )
    return EvidenceGathered(at=START + 61, attempt=1, host="host-1", ranks=ranks)


def test_describe_shows_every_incident_completely() -> None:
    text = describe_text(snapshot(failed(), metrics(1, 9), alive=False), UTC)
    for words in (
        "#1 exception",
        "#2 exception",
        "rank 1 raised ValueError: boom at step 10",
        "| Trace",
        "| ValueError: boom",
        "the same error twice",
        "not recovered",
        "restart as attempt 2",
        "ndctl logs quickstart --rank 1 --attempt 2",
        "plan-1.json",
        "tp=2 fills the host",
        "agent pid 100",
    ):
        assert words in text, words


def test_nothing_is_said_of_steps_that_a_program_does_not_report() -> None:
    ends = [HostStopped(at=START + 90, attempt=2, host=host, finished=True) for host in HOSTS]
    runs, ended = snapshot(silent_program()), snapshot(silent_program(*ends), alive=False)
    assert "progress    no step reported yet\n" in status_text(runs, UTC)
    text = describe_text(ended, UTC)
    assert "progress    no step reported\n" in text
    assert "cause     rank 1 raised ValueError: boom\n" in text
    assert "attempt 1, before any step was reported\n" in text
    assert "the recovery was not timed, because no step was reported after it\n" in text
    assert not re.search(r"steps? 0|step 1\b|0 steps|not recovered", text)
    assert "steps       no step reported\n" in summary_text(ended, UTC)
    # FSDP2's example of pytorch/examples does so on a machine with too few GPUs.
    for text in (status_text(ended, UTC), summary_text(ended, UTC)):
        (said,) = labelled("next", text)
        assert said == "if it should have trained, see its output: ndctl logs quickstart"


def test_a_program_that_does_not_load_its_checkpoint_is_told_how_to_resume() -> None:
    saved = CheckpointSaved(at=START + 20, attempt=1, step=80)
    first, *rest = silent_program()
    events = [first, *rest[:-3], saved, *rest[-3:]]
    resumed = TrainingResumed(at=START + 60, attempt=2, step=0)
    text = status_text(snapshot([*events, resumed]), UTC)
    (said,) = labelled("checkpoint", text)
    assert said == (
        "none yet; your program did not load step-80, it started at step 0:"
        " to resume, it must load what ndctl.latest_checkpoint() returns"
    )
    later = CheckpointSaved(at=START + 70, attempt=2, step=20)
    text = status_text(snapshot([*events, resumed, later]), UTC)
    assert "your program did not load step-80" in text
    stopped = [HostStopped(at=START + 90, attempt=2, host=host, finished=False) for host in HOSTS]
    ended = [*events, resumed, later, CancelRequested(at=START + 80, by="me"), *stopped]
    (said,) = labelled("next", status_text(snapshot(ended, alive=False), UTC))
    assert said.startswith("to start again where your program resumes: ndctl submit ")


def test_a_program_without_steps_that_runs_again_is_in_no_trouble() -> None:
    runs = snapshot(silent_program(ProgramRuns(at=START + 60, attempt=2)))
    text = status_text(runs, UTC)
    assert text.startswith("quickstart: RUNNING, attempt 2 runs, without steps\n")
    assert ", all ranks ran again after 30 s\n" in text
    assert "progress    no step reported yet\n" in text
    assert runs.view.stage == "running"
    assert {rank for host in runs.view.hosts for rank in host.ranks} == {"ok"}


def test_a_program_without_steps_that_breaks_again_has_recovered_from_its_first_incident() -> None:
    again = (HostStopped(at=START + 91, attempt=2, host=host, finished=False) for host in HOSTS)
    broke = replace(killed(START + 90), attempt=2, step=0)
    text = describe_text(
        snapshot(silent_program(ProgramRuns(at=START + 60, attempt=2), broke, *again)), UTC
    )
    assert text.startswith("quickstart: RECOVERING")
    assert text.count("all ranks ran again after 30 s\n") == 1
    assert "not yet recovered\n" in text


def test_describe_names_the_logs_where_they_are() -> None:
    """A copy of a job on Kubernetes has no logs, unless `ndctl logs` fetched them."""
    job, *events = started()
    assert isinstance(job, JobSubmitted)
    job = replace(job, launch=replace(job.launch, run_dir="/ndctl/runs/quickstart"))
    text = describe_text(snapshot([job, *events]), UTC)
    assert "/ndctl/runs/quickstart/logs/attempt-1" in text
    assert " /runs/quickstart/logs" not in text


def test_describe_leaves_out_what_a_program_does_not_report() -> None:
    steps = [replace(one, loss=None, tokens_per_second=None) for one in metrics(1, 9)]
    text = describe_text(snapshot(started(), steps), UTC)
    (speed,) = labelled("speed", text)
    assert speed.endswith(" per step")
    assert labelled("loss", text) == []


def test_a_job_that_ended_without_a_checkpoint_will_not_get_one() -> None:
    assert labelled("checkpoint", status_text(snapshot(started()), UTC)) == ["none yet"]
    assert labelled("checkpoint", status_text(snapshot(failed(), alive=False), UTC)) == ["none"]


def test_describe_gives_the_advice_for_a_class_once() -> None:
    text = describe_text(snapshot(failed(), metrics(1, 9), alive=False), UTC)
    advice = "the traceback shows where; if it repeats, the program is wrong"
    rows = [line.split()[:2] for line in text.splitlines() if advice in line]
    assert rows == [["to", "do"]] * 2


def test_describe_shows_the_stacks_of_a_hang() -> None:
    events = [
        *hung(),
        evidence(),
        Tick(at=START + 75),
        *(
            HostStopped(at=START + 76, attempt=1, host=host, finished=False)
            for host in ("host-0", "host-1")
        ),
        hang_judged(at=START + 77, stacks={"2": ("train.py:10 step", "main.py:3 main"), "3": ()}),
    ]
    text = describe_text(
        snapshot(events), UTC, [SkippedCheckpoint("step-9", "its marker is missing")]
    )
    assert "(confidence 98%)\n" in text
    assert "waiting: mesh_tp, operation 7" in text
    assert "stack of rank 2" in text
    assert "| train.py:10 step" in text
    assert "rank 3" in text
    assert "step-9: its marker is missing" in text
    assert "traces" in text


def test_describe_shows_the_culprits_stack_and_folds_stacks_of_waiting_ranks() -> None:
    """For ranks that wait, the frames of the program are useful. Eleven frames of torch are not."""
    torch = '  File "/v/site-packages/torch/distributed/distributed_c10d.py", line {} in all_reduce'
    inside = '  File "/v/site-packages/torch/autograd/function.py", line 1 in apply'
    ours = '  File "/job/trainer/step.py", line 71 in agree'
    main = '  File "/job/trainer/__main__.py", line 14 in <module>'
    head = "Current thread 0x1 (most recent call first):"
    waits = {str(rank): (head, torch.format(rank), *9 * (inside,), ours, main) for rank in range(3)}
    culprit = (head, '  File "/job/trainer/data/mask.py", line 12 in spin', main)
    lines = list(_stacks({**waits, "3": culprit}, 3))
    assert [line.strip() for line in lines] == [
        "stack of rank 3:",
        f"| {head}",
        *(f"| {visible(line)}" for line in culprit[1:]),
        "stacks    ranks 0-2 are in all_reduce (distributed/distributed_c10d.py:0),"
        " called by agree (trainer/step.py:71)",
    ]


def test_describe_of_many_hosts_stays_readable() -> None:
    text = describe_text(snapshot(started(100, 8, spares=1)), UTC)
    assert "68 more" in text
    assert "spare" in text


@pytest.mark.parametrize(("kind", "advised"), [("pytorchjob", False), ("jobset", True)])
def test_describe_names_unused_nodes_and_how_to_cordon_them(kind: Any, advised: bool) -> None:
    job, leader, *rest = started()
    assert isinstance(job, JobSubmitted)
    assert isinstance(leader, LeaderStarted)
    launch = replace(job.launch, kubernetes=KubernetesSpec(kind=kind))
    leader = replace(leader, exclude={"node-3": "two strikes"})
    seen = snapshot([replace(job, launch=launch), leader, *rest])
    text = describe_text(seen, UTC)
    assert "excluded: two strikes" in text
    assert status_json(seen)["excluded"] == {"node-3": "two strikes"}
    assert ("kubectl cordon node-3" in text) == advised


def test_checkpoints_are_in_the_copied_run_directory_if_it_has_them(tmp_path: Path) -> None:
    there = snapshot(started())
    copy = replace(there, run_dir=RunDir(tmp_path))
    job = copy.seen.run.job
    assert job is not None
    assert copy.checkpoints == Path(job.launch.run_dir) / "checkpoints"
    (tmp_path / "checkpoints").mkdir()
    assert copy.checkpoints == tmp_path / "checkpoints"


def test_a_snapshot_is_read_from_a_run_directory(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert read_snapshot(run_dir, START) is None
    with Journal(run_dir.journal, StoryClock()) as written:
        for entry in journal(started()):
            written.append(entry.event, entry.actions)
        alive = read_snapshot(run_dir, START + 10)
    gone = read_snapshot(run_dir, START + 10)
    assert alive is not None
    assert gone is not None
    assert (alive.standing.state, gone.standing.state) == ("RUNNING", "FAILED")


@pytest.mark.process
def test_status_needs_no_heavy_import() -> None:
    code = (
        "import sys, orchestrator.dashboard.status, orchestrator.dashboard.describe;"
        "import orchestrator.dashboard.event_text, orchestrator.dashboard.follow.logs;"
        "print({'rich', 'torch', 'yaml', 'aiohttp', 'click', 'pydantic'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def all_events() -> list[Event]:
    passed = (SkippedCheckpoint("step-40", "its marker is missing"),)
    return [
        *failed(),
        *finished(),
        *hung(),
        evidence(),
        submitted(resume=True),
        TrainingResumed(at=START, attempt=2, step=20, passed_over=passed),
        SAVE_FAILED,
        HealthChanged(at=START, attempt=1, ranks=((3, 3),), health="silent", age_s=7.0),
        HealthChanged(at=START, attempt=1, ranks=((0, 1), (3, 3)), health="slow", age_s=7.0),
        SLOW,
        StragglerGone(at=START, attempt=1, rank=3, host="host-1", own_s=0.1, peers_s=0.1),
        AgentLost(at=START, host="host-1", why="its connection closed", silent_s=1.0),
        HangOver(at=START, attempt=1, rank=3, step=13, phase="train"),
        HangJudged(
            at=START,
            attempt=1,
            verdict="never-entered",
            cause="rank 3 did not call the operation in which the others wait",
            scope="rank",
            ranks=(3,),
            hosts=("host-1",),
            confidence=0.95,
        ),
        CheckpointIntervalChanged(
            at=START, attempt=1, step=40, old=20, new=35, why="a save costs 2.1 s"
        ),
        MemoryCheckpointsSet(at=START, attempt=1, copies=None, why="host-1 has\n3 GiB left"),
        CheckpointSlow(at=START, attempt=1, step=40, took_s=42.0, usual_s=8.0),
        JournalDelayed(at=START, waited_s=12.0, why="[Errno 28] No space left on device"),
        LogGrew(at=START, attempt=1, rank=0, size=1 << 30, per_second=1e8),
        ProgramRuns(at=START, attempt=1),
        NoticeSent(at=START, notice="incident-1", receiver="1 slack", delivered=True, tries=2),
        CancelRequested(at=START, by="ada"),
        Tick(at=START),
        killed(START),
        HostStopped(at=START, attempt=1, host="host-0", finished=False, why="two\nlines"),
        *arrivals(["host-9"], START),
        *scheduled(),
    ]


def scheduled() -> list[Event]:
    """Events that only happen with a scheduler."""
    smaller = submitted().plan
    return [
        LeaveAsked(at=START, cause=None, words="SIGUSR2"),
        LeaveAsked(at=START, cause="preempted", words="SIGUSR2"),
        HostFlagged(at=START, host="host-1", state="DRAINING", reason="bad fan"),
        HostOpened(at=START, host="host-1"),
        HostLeaving(at=START, host="host-1", why="SIGTERM"),
        HostUnavailable(at=START, host="host-1", why="Slurm says DOWN"),
        HostsChecked(at=START, check=1, unfit={"host-1": "both links are slow"}),
        Replanned(at=START, plan=smaller, plan_number=2),
        ReplanRefused(at=START, hosts=1, why="the batch does not divide"),
        RequeueRefused(at=START, why="Slurm job 7 has ended"),
        HostWarned(at=START, host="host-1", problem="links", what="port mlx5_0/1 is lost"),
        RunDirLost(at=START, why="the run directory was moved or removed"),
    ]


def test_actions_of_a_scheduler_are_described() -> None:
    lines = [describe_event(event) for event in scheduled()]
    assert lines[0] == "the scheduler asks the job to stop: the cause is not known yet (SIGUSR2)"
    assert lines[2] == "host-1 is DRAINING: bad fan"
    assert lines[3] == "host-1 is available again"
    assert lines[4] == "the scheduler is removing host-1 from the job: SIGTERM"
    assert lines[6] == "host check failed: host-1 (both links are slow)"
    assert lines[9] == "the scheduler refused to requeue the job: Slurm job 7 has ended"
    allocation = Allocation(id="17", restarts=2, hosts=("host-0", "host-1"))
    started = LeaderStarted(at=START, host="host-0", pid=7, allocation=allocation)
    assert describe_event(started) == (
        "leader started on host-0 (pid 7) in allocation 17 (2 hosts, requeued 2 times)"
    )
    deaf = LeaderStarted(at=START, host="host-0", pid=7, unable="no scontrol")
    assert describe_event(deaf) == "host-0 cannot run the leader: no scontrol"


def test_the_cost_of_a_placement_is_shown_at_the_start_of_an_attempt() -> None:
    start = StartAttempt(
        attempt=1,
        hosts=("a", "b"),
        plan=1,
        drills=(),
        reason="attempt 1",
        crossing=(3 << 30, 1 << 30),
    )
    line = (
        "start attempt 1, network traffic per step:"
        " 3.0 GiB between hosts (1.0 GiB between leaf switches)"
    )
    assert describe_action(start) == line


def test_every_kind_of_event_has_one_line() -> None:
    events = all_events()
    assert {type(event) for event in events} == set(get_args(Event))
    for event in events:
        line = event_line(Entry(seq=1, event=event, actions=()), UTC)
        assert "\n" not in line
        assert line.startswith("2023-11-14 22:")
        assert len(line) > 30


def test_the_use_of_memory_and_its_reason_are_told() -> None:
    said = MemoryCheckpointsSet(at=START, attempt=1, copies=2, host_bytes=3 << 30)
    use = "3.0 GiB of each host's memory"
    assert describe_event(said) == f"checkpoints in memory: {use}, 2 copies of each on other hosts"
    fewer = replace(said, copies=1, why="less than 2 copies fit")
    assert memory_use(fewer) == f"{use}, 1 copy of each on another host; less than 2 copies fit"
    assert memory_use(replace(said, copies=0)) == f"{use}, no copy on another host"
    off = replace(said, copies=None, why="they need 6.0 GiB on h")
    assert memory_use(off) == "none: they need 6.0 GiB on h"
    described = describe_text(snapshot([*started(), off]), UTC)
    assert "in memory   none: they need 6.0 GiB on h" in described
    ended = CancelRequested(at=START + 50, by="ann", led=False)
    assert "in memory" not in describe_text(snapshot([*started(), said, ended]), UTC)


def test_events_are_ordered_by_time_and_a_stopped_rank_ends_at_its_stop() -> None:
    """Its last heartbeat is from the start of the hang, but it ended when all ranks were
    stopped."""
    stopped = replace(
        killed(START + 49, rank=2, host="host-1"), signal=None, stopped=True, detected_after_s=16.0
    )
    lost = replace(killed(START + 50, rank=0), signal=None)
    told = [*hung(), stopped, lost]
    entries = [Entry(seq=n, event=event, actions=()) for n, event in enumerate(told)]
    lines = [event_line(entry, UTC) for entry in sort_by_time(entries)]
    assert [line[:19] for line in lines] == sorted(line[:19] for line in lines)
    assert lines[-1] == (
        "2023-11-14 22:14:25 UTC  rank 2 on host-1 was stopped after step 24 while ndctl stopped"
        " its attempt"
    )
    assert lines[-2].endswith("(limit 10 s), rank 3 behind"), lines[-2]
    assert (
        "rank 0 on host-0 disappeared without an exit status after step 24 (detected after 0.2 s)"
        in lines[-3]
    )
    arrived = [entry.seq for entry in sort_by_time(entries) if entry.event.at == START + 2]
    assert arrived == sorted(arrived), "what happened at one moment stays as it was told"


def test_every_kind_of_action_is_shown_with_its_reason() -> None:
    entries = [*journal(failed()), *journal(hung())]
    actions = [action for entry in entries for action in entry.actions]
    actions.append(ReplaceAgent(host="host-1", reason="it is gone"))
    actions.append(JudgeHang(attempt=1, reason="no rank made progress"))
    actions.append(CheckHosts(check=1, hosts=("host-1",), timeout_s=60, reason="before the start"))
    actions.append(SaveCheckpoint(attempt=1, reason="host-1 warns"))
    actions.append(Replan(hosts=1, reason="one is left"))
    actions.append(Requeue(exclude=("host-1",), reason="none is left"))
    assert {type(action) for action in actions} == set(get_args(Action))
    for action in actions:
        assert action.reason in describe_action(action)


def test_a_decision_is_shown_on_the_line_of_its_event() -> None:
    end = EndJob(state="CANCELLED", reason="cancelled by ada")
    event = CancelRequested(at=START, by="ada")
    line = event_line(Entry(seq=9, event=event, actions=(end,)), UTC)
    assert line == (
        "2023-11-14 22:13:20 UTC  cancel requested by ada"
        " -> end the job: CANCELLED (cancelled by ada)"
    )


def test_an_exception_without_a_message_has_no_colon() -> None:
    silent = replace(ERROR, error="MemoryError", message="")
    line = describe_event(replace(raised(1, START), error=silent))
    assert "raised MemoryError after step" in line


def test_an_exit_is_described_by_its_signal_or_exception() -> None:
    assert "was killed by SIGKILL after step 24" in describe_event(killed(START))
    assert "raised ValueError: boom" in describe_event(raised(1, START))


def test_a_long_error_is_shortened() -> None:
    error = RankError(error="RuntimeError", message="peer " * 200, step=3, traceback="")
    assert len(describe_event(replace(raised(1, START), error=error))) < 250


def test_a_restarting_job_is_recovering() -> None:
    text = status_text(snapshot(restarting(), metrics(1, 24)), UTC)
    assert text.startswith("quickstart: RECOVERING")
    assert "not yet recovered" in text


def test_a_drained_host_that_the_job_keeps_is_shown() -> None:
    drained = HostFlagged(
        at=START + 20, host="host-1", state="ALLOCATED+DRAIN", reason="bad cable", lets_finish=True
    )
    on_slurm = replace(submitted().launch, slurm=SlurmSpec(on_drain="finish"))
    seen = snapshot([*started(launch=on_slurm), drained])
    words = (
        "host-1 is ALLOCATED+DRAIN: bad cable; the job keeps it until it ends or is queued again"
    )
    assert labelled("draining", status_text(seen, UTC)) == [words]
    over = replace(seen, leader_alive=False)
    assert labelled("draining", status_text(over, UTC)) == []


def test_a_queued_job_is_pending_with_the_reason() -> None:
    from msgspec.structs import replace

    words = "Slurm job 12 is PENDING (JobHeldUser): it is held: `scontrol release 12` lets it go"
    waiting = replace(
        snapshot(started(), alive=False), launch_status=LaunchStatus(words, held=True)
    )
    assert status_json(waiting)["state"] == "PENDING"
    text = status_text(waiting, UTC)
    assert words in text.splitlines()[0]
    assert labelled("next", text) == ["wait; to give up: ndctl cancel quickstart"]
    assert labelled("where", text)[0].startswith("4 ranks last on 2 hosts (host-0, host-1)")
    never = LaunchStatus(words, held=True, needs="to release it: scontrol release 12")
    text = status_text(replace(waiting, launch_status=never), UTC)
    assert labelled("next", text) == [f"{never.needs}; to give up: ndctl cancel quickstart"]


def test_a_job_that_never_started_has_only_planned_hosts() -> None:
    held = LaunchStatus("Slurm job 12 is PENDING", held=True)
    waiting = replace(snapshot([submitted()], alive=False), launch_status=held)
    where = labelled("where", status_text(waiting, UTC))[0]
    assert where.startswith("4 ranks planned for 2 hosts (host-0, host-1)")
    host = ["ranks 0-1: not started; agent not registered"]
    assert labelled("host-0", describe_text(waiting, UTC)) == host
    cancelled = LaunchStatus("Slurm job 12 has ended: CANCELLED", held=False, over="CANCELLED")
    text = status_text(replace(waiting, launch_status=cancelled), UTC)
    assert labelled("where", text) == [where]
    assert labelled("next", text)[0].startswith("to start again from step 0: ndctl submit ")


UNREACHABLE = LaunchStatus(
    "PyTorchJob ndctl/quickstart",
    held=True,
    unknown="the API server of context prod cannot be reached: Connection refused",
    fix="`kubectl --context prod cluster-info` says whether it is up",
    at=START + 40,
)


def test_a_job_of_an_unreachable_cluster_shows_its_last_known_state() -> None:
    """It is not shown as waiting, because it may still train."""
    away = replace(
        snapshot(started(), metrics(1, 23), now=START + 240, alive=False), launch_status=UNREACHABLE
    )
    text = status_text(away, UTC)
    at = date_time(START + 40, UTC)
    assert text.splitlines()[0] == (
        f"quickstart: RUNNING as of {at} (3 min 20 s ago); the API server of context prod cannot be"
        " reached: Connection refused"
    )
    assert text.count("cannot be reached") == 1
    assert "step 23 of" in text
    assert "left" not in text, "whether it still trains is not known"
    assert text.endswith("is up\n              to ask again: ndctl status quickstart")
    body = status_json(away)
    assert (body["state"], body["as_of"], body["leader_alive"]) == ("RUNNING", START + 40, None)
    assert stale_reasons([away.standing, away.standing]) == [
        f"{UNREACHABLE.unknown}; 2 jobs shown with the last known state"
    ]
    there = status_json(snapshot(started(), metrics(1, 23)))
    assert (there["as_of"], there["leader_alive"]) == (None, True)
    assert stale_reasons([]) == []


def test_a_deleted_job_offers_to_resume_from_its_checkpoint() -> None:
    gone = LaunchStatus(
        "PyTorchJob a/b was deleted, not known by whom", held=False, over="CANCELLED"
    )
    text = status_text(
        replace(snapshot(recovered(), metrics(1, 24), alive=False), launch_status=gone), UTC
    )
    assert text.startswith("quickstart: CANCELLED, PyTorchJob a/b was deleted, not known by whom")
    assert text.count("was deleted") == 1
    newest = r"next +to resume from the newest checkpoint, step-\d+ or later: "
    assert re.search(newest + "ndctl submit .* --resume$", text)


def test_the_end_of_the_allocation_is_shown_while_a_leader_lives() -> None:
    granted = Allocation(id="12", restarts=0, hosts=("host-0",), ends_at=START + 40 + 7200)
    leads = [
        replace(e, allocation=granted) if isinstance(e, LeaderStarted) else e for e in started()
    ]
    there = replace(snapshot(leads), launch_status=LaunchStatus("Slurm job 12", held=False))
    ends = date_time(START + 40 + 7200, UTC)
    text = status_text(there, UTC)
    assert f"Slurm job 12, granted until {ends}, in 2 h" in text
    assert "unless its time limit was changed" in text
    assert "granted until" not in status_text(replace(there, leader_alive=False), UTC)


def test_a_job_that_was_removed_from_the_queue_is_not_waiting() -> None:
    queued = snapshot([submitted()], now=START + 1, alive=False)
    assert status_json(queued)["state"] == "SUBMITTED"
    gone = status_json(
        replace(queued, launch_status=LaunchStatus("Slurm job 12 has ended", held=False))
    )
    assert gone["state"] == "FAILED"
    assert gone["reason"] == "no leader started: Slurm job 12 has ended"
    assert gone["fix"].endswith("--resume")


def test_a_job_of_a_sweep_shows_its_values_and_its_group() -> None:
    values = ("train.seed=2", "-f /specs/site.yaml", "train.optimizer.lr=3e-4", "name='lr-3e-4'")
    commands = Commands(job="lr-3e-4", overrides=values, root=("--run-root", "r"))
    seen = snapshot([submitted(group="lr")], metrics(1, 2))
    seen = replace(seen, known_by=commands)
    text = describe_text(seen, UTC)
    assert "  settings    train.seed=2 -f /specs/site.yaml train.optimizer.lr=3e-4\n" in text
    assert "  group       lr; all its jobs: `ndctl list lr --run-root r`\n" in text
    assert "  group       lr; " in status_text(seen, UTC)
    answer = describe_json(seen)
    assert answer["group"] == "lr"
    assert answer["settings"] == list(values[:-1])


def test_a_job_without_a_group_and_settings_has_no_rows_for_them() -> None:
    text = describe_text(snapshot(finished(), metrics(1, 20)), UTC)
    assert "  group " not in text
    assert "  settings " not in text
