"""The rows of all jobs: order, columns at each width, and how much of the time was effective."""

from datetime import UTC
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import HostStopped, RankError
from orchestrator.contract.spec.failures import ExitReading, Reading
from orchestrator.dashboard import format
from orchestrator.dashboard.fleet.row import JobRow, in_order, is_old, is_trouble, row_json
from orchestrator.dashboard.fleet.summary import JobSummary, eta_s, summary_of
from orchestrator.dashboard.fleet.table import table
from orchestrator.dashboard.status import status_text
from orchestrator.journal.journal import Journal
from orchestrator.seams import LaunchStatus
from tests.dashboard.dashboard_story import (
    HOSTS,
    START,
    StoryClock,
    broken,
    finished,
    journal,
    killed,
    metrics,
    recovered,
    restarting,
    started,
)
from tests.dashboard.fleet.table_text import text_of
from tests.dashboard.test_status import failed, snapshot

NOW = START + 40
LONG = "no host of partition a100 is free; 12 jobs are ahead, the first ends in 3 h (资源不足)"


def row(job: JobSummary | None, name: str = "quickstart", **more: object) -> JobRow:
    known = {"user": "alice", "backend": "local", "hosts": 2, "gpus": 4, "submitted_at": START}
    known |= {"name": name, "run_dir": f"/scratch/alice/experiments/runs/{name}", "job": job}
    return JobRow(**(known | more))  # type: ignore[arg-type]


RUNNING = summary_of(snapshot(started(), metrics(1, 3)))
FAILED = replace(RUNNING, state="FAILED", note="out of memory", since=START + 20)


def some_rows() -> list[JobRow]:
    waiting = replace(RUNNING, state="PENDING", note=LONG, scheduler=f"Slurm job 12: {LONG}")
    recovering = summary_of(snapshot(broken(), metrics(1, 3)))
    done = summary_of(snapshot(finished(), metrics(1, 60, 2)))
    return [
        row(done, "done"),
        row(RUNNING, "runs", hosts=512, gpus=4096),
        row(waiting, "sweep-train.optimizer.lr-0.0003-train.seed-17-warmup-2000"),
        row(FAILED, "broke"),
        row(recovering, "recovers"),
        row(None, "gone", problem="/scratch/x does not exist", gone=True),
    ]


def lines(width: int | None) -> list[str]:
    return text_of(table(in_order(some_rows(), NOW), NOW, width)).splitlines()


def test_trouble_comes_first_and_ended_jobs_last() -> None:
    names = [one.name[:5] for one in in_order(some_rows(), NOW)]
    assert names == ["recov", "broke", "runs", "sweep", "done", "gone"]


def test_a_failure_is_trouble_for_a_day_and_old_after_a_week() -> None:
    broke = row(FAILED)
    assert is_trouble(broke, START + 3600)
    assert not is_trouble(broke, START + 2 * 86_400)
    assert not is_trouble(replace(broke, archived=True), START + 3600)
    assert not is_old(broke, START + 6 * 86_400)
    assert is_old(broke, START + 8 * 86_400)
    assert not is_old(row(RUNNING), START + 800 * 86_400)


def test_the_note_of_a_recovering_job_says_from_what() -> None:
    assert summary_of(snapshot(restarting(), metrics(1, 24))).note == (
        "rank-killed, culprit rank 1 on host-0; attempt 2 on 2 hosts from checkpoint step-20"
    )
    assert summary_of(snapshot(recovered(), metrics(1, 24))).note == ""


def test_the_note_of_a_stopped_job_has_its_cause() -> None:
    error = RankError(error="ImportError", message="no module peft", step=0, traceback="")
    failure = Reading(name="import-or-version", scope="user", action="stop", advice="install it")
    raised = replace(
        killed(START + 30),
        exit_code=1,
        signal=None,
        error=error,
        reading=ExitReading(failure=failure),
    )
    ends = [HostStopped(at=START + 31, attempt=1, host=host, finished=False) for host in HOSTS]
    note = summary_of(snapshot([*started(), raised, *ends], metrics(1, 24))).note
    assert note.startswith("rank 1 raised ImportError: no module peft")
    assert "; the job was stopped: import-or-version; install it" in note
    twice = summary_of(snapshot(failed(), alive=False)).note
    assert twice.count("ValueError: boom") == 1


def test_a_pipe_gets_every_column_in_full() -> None:
    head, *rows = lines(None)
    assert head.split("  ")[0] == "NAME"
    for title in ("USER", "STATE", "BACKEND", "SIZE", "STEP", "ETA", "EFFECTIVE", "RESTARTS"):
        assert title in head
    assert "AGE" in head
    assert "SCHEDULER" in head
    assert any(LONG in one and "/runs/sweep-train" in one for one in rows)
    assert any("512x8" in one and "3/60" in one for one in rows)


@pytest.mark.parametrize("width", [40, 60, 80, 120, 160, 200, 300])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for line in lines(width):
        assert format.cells(line) <= width, line


def test_what_is_dropped_first_is_what_status_shows_anyway() -> None:
    assert lines(80)[0].split() == ["NAME", "STATE", "STEP", "ETA", "AGE", "NOTE"]
    assert lines(120)[0].split()[-1] == "NOTE"
    assert "RUN DIR" not in lines(120)[0]
    assert "EFFECTIVE" in lines(160)[0]
    assert "RUN DIR" in lines(300)[0]


def test_the_scheduler_and_the_note_have_no_column_if_no_job_has_one() -> None:
    (head, _) = text_of(table([row(RUNNING)], NOW, None)).splitlines()
    assert head.split()[-2:] == ["RUN", "DIR"]
    assert "SCHEDULER" not in head


def test_an_unreachable_job_shows_the_age_of_its_state() -> None:
    words = LaunchStatus("PyTorchJob x", held=True, unknown="prod is unreachable", at=START + 10)
    job = summary_of(replace(snapshot(started(), alive=False), launch_status=words))
    (_, line) = text_of(table([row(job)], NOW, None)).splitlines()
    assert "RUNNING 30s ago" in line
    assert "prod is unreachable" in line


def test_only_a_running_job_has_a_remaining_time() -> None:
    assert eta_s(RUNNING, NOW) is not None
    assert eta_s(replace(RUNNING, state="RECOVERING"), NOW) is None
    assert eta_s(replace(RUNNING, steps=0), NOW) is None
    assert eta_s(replace(RUNNING, as_of=START), NOW) is None
    assert eta_s(replace(RUNNING, steps=10**12), NOW) is None


def test_the_effective_time_is_that_of_status(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    with Journal(run_dir.journal, StoryClock()) as written:
        for entry in journal(finished()):
            written.append(entry.event, entry.actions)
    seen = replace(snapshot(finished(), metrics(1, 60)), run_dir=run_dir)
    share = summary_of(seen).effective_ratio
    assert share is not None
    assert 0 < share < 1
    assert f"effective   {share:.1%} of" in status_text(seen, UTC)
    (_, line) = text_of(table([row(summary_of(seen))], NOW, None)).splitlines()
    assert f"{share:.0%}" in line


def test_json_has_the_same_keys_for_every_row() -> None:
    bodies = [row_json(one, NOW) for one in some_rows()]
    assert {tuple(sorted(body)) for body in bodies} == {tuple(sorted(bodies[0]))}
    assert [body["state"] for body in bodies if body["name"] == "gone"] == ["GONE"]
    assert bodies[1]["run_dir"] == str(Path("/scratch/alice/experiments/runs/runs"))
