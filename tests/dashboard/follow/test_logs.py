from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import JobSubmitted
from orchestrator.dashboard.follow import logs as module
from orchestrator.dashboard.follow.follow_loop import agent_lines, log_lines
from orchestrator.dashboard.follow.logs import (
    LogLine,
    attempts,
    follow_logs,
    log_files,
    read_logs,
    start_of_tail,
)
from orchestrator.errors import JobError
from orchestrator.journal.journal import to_line
from tests.dashboard.dashboard_story import StoryClock, journal, started


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def write(run_dir: RunDir, rank: int | None, text: str, attempt: int = 1) -> None:
    host = "host-0" if rank is None else f"host-{rank // 2}"
    folder = run_dir.attempt_logs(attempt, host)
    folder.mkdir(parents=True, exist_ok=True)
    name = "torchrun.log" if rank is None else f"rank-{rank}.log"
    with (folder / name).open("a") as file:
        file.write(text)


def said(lines: list[LogLine]) -> list[str]:
    return [str(line) for line in lines]


def merged(run_dir: RunDir, attempt: int = 1, tail: int | None = None) -> list[str]:
    return said(list(read_logs(log_files(run_dir, attempt), tail)))


def test_files_are_found_by_rank_and_torchrun_comes_last(run_dir: RunDir) -> None:
    for rank in (10, 2, None, 0):
        write(run_dir, rank, "")
    write(run_dir, 1, "", attempt=2)
    (run_dir.attempt_logs(1, "host-0") / "notes.log").touch()
    assert [file.label for file in log_files(run_dir, 1)] == [
        "host-0 rank 0",
        "host-1 rank 2",
        "host-5 rank 10",
        "host-0 torchrun",
    ]
    assert [file.label for file in log_files(run_dir, 1, rank=2)] == ["host-1 rank 2"]
    assert log_files(run_dir, 7) == []
    assert attempts(run_dir) == [1, 2]


def test_lines_are_merged_by_time_and_tracebacks_stay_together(run_dir: RunDir) -> None:
    write(run_dir, 0, "2025-11-20 18:00:01,5 a\nTraceback\n  boom\n2025-11-20 18:00:04 d\n")
    write(run_dir, 1, "2025-11-20T18:00:02.25 b\n")
    write(run_dir, None, "W1120 18:00:03.000000 99 torch/x.py] c\n")
    assert merged(run_dir) == [
        "[host-0 rank 0] 2025-11-20 18:00:01,5 a",
        "[host-0 rank 0] Traceback",
        "[host-0 rank 0]   boom",
        "[host-0 rank 1] 2025-11-20T18:00:02.25 b",
        "[host-0 torchrun] W1120 18:00:03.000000 99 torch/x.py] c",
        "[host-0 rank 0] 2025-11-20 18:00:04 d",
    ]


def test_files_without_times_are_shown_one_after_the_other_by_rank(run_dir: RunDir) -> None:
    write(run_dir, 2, "c\nd")
    write(run_dir, 0, "a\nb\n")
    assert merged(run_dir) == [
        "[host-0 rank 0] a",
        "[host-0 rank 0] b",
        "[host-1 rank 2] c",
        "[host-1 rank 2] d",
    ]


def test_a_missing_file_is_skipped(run_dir: RunDir) -> None:
    write(run_dir, 0, "a\n")
    files = log_files(run_dir, 1)
    files[0].path.unlink()
    assert list(read_logs(files)) == []
    assert list(read_logs(files, tail=3)) == []


@pytest.mark.parametrize("chunk", [1, 2, 5, 1000])
@pytest.mark.parametrize("text", ["", "\n", "a", "a\n", "a\nb\n\nc\nd", "aa\nbb\ncc\n"])
@pytest.mark.parametrize("tail", [0, 1, 2, 3, 9])
def test_a_tail_is_the_last_lines(
    tmp_path: Path, text: str, tail: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    path = tmp_path / "log"
    path.write_text(text)
    lines = text.splitlines(keepends=True)
    assert text[start_of_tail(path, tail) :] == "".join(lines[len(lines) - min(tail, len(lines)) :])


def test_a_tail_applies_to_each_file(run_dir: RunDir) -> None:
    write(run_dir, 0, "a\nb\nc\n")
    write(run_dir, 1, "d\ne\n")
    assert merged(run_dir, tail=1) == ["[host-0 rank 0] c", "[host-0 rank 1] e"]


class Script:
    """Writes one text after each poll of the files. The job has ended after the last text."""

    def __init__(self, *acts: tuple[int | None, str, int]) -> None:
        self.acts = list(acts)

    def follow(
        self,
        run_dir: RunDir,
        *,
        rank: int | None = None,
        attempt: int | None = None,
        tail: int | None = None,
    ) -> list[str]:
        def act() -> None:
            if self.acts:
                who, text, number = self.acts.pop(0)
                write(run_dir, who, text, number)

        clock = StoryClock(during=act)
        lines = follow_logs(
            run_dir, clock=clock, ended=lambda: not self.acts, rank=rank, attempt=attempt, tail=tail
        )
        return [str(line) for line in lines]


def test_following_yields_only_complete_lines(run_dir: RunDir) -> None:
    write(run_dir, 0, "old\npar")
    script = Script((0, "tial\n", 1), (1, "b\n", 1), (0, "last", 1))
    assert script.follow(run_dir) == [
        "[host-0 rank 0] old",
        "[host-0 rank 0] partial",
        "[host-0 rank 0] last",
        "[host-0 rank 1] b",
    ]


def test_following_continues_with_the_next_attempt(run_dir: RunDir) -> None:
    write(run_dir, 0, "one\nunfinished")
    idle = (0, "", 2)
    script = Script((0, "two\n", 2), idle, idle, idle, idle, (0, "three\n", 2), idle)
    assert script.follow(run_dir) == [
        "[host-0 rank 0] one",
        "[host-0 rank 0] unfinished",
        "[host-0 rank 0] two",
        "[host-0 rank 0] three",
    ]


def test_following_one_attempt_ignores_the_next(run_dir: RunDir) -> None:
    write(run_dir, 0, "one\n")
    assert Script((0, "two\n", 2)).follow(run_dir, attempt=1) == ["[host-0 rank 0] one"]


def test_following_can_start_with_the_last_lines_of_one_rank(run_dir: RunDir) -> None:
    write(run_dir, 0, "a\nb\nc\n")
    write(run_dir, 1, "x\n")
    script = Script((0, "d\n", 1), (1, "y\n", 1))
    assert script.follow(run_dir, rank=0, tail=1) == ["[host-0 rank 0] c", "[host-0 rank 0] d"]


def test_following_waits_for_the_first_log(run_dir: RunDir) -> None:
    script = Script((0, "first\n", 1), (0, "", 1))
    assert script.follow(run_dir, tail=5) == ["[host-0 rank 0] first"]


def test_logs_of_agents_can_be_shown(run_dir: RunDir) -> None:
    write(run_dir, 0, "step 1\n")
    with pytest.raises(JobError, match="no agent"):
        list(agent_lines(run_dir, None))
    run_dir.agent_log("node-1").write_text("leads\nno space left on device\n")
    assert [*map(str, agent_lines(run_dir, 1))] == ["[node-1 agent] no space left on device"]


@pytest.mark.parametrize("follow", [False, True])
def test_if_no_agent_started_the_logs_of_its_tasks_are_named(run_dir: RunDir, follow: bool) -> None:
    """`ndctl status` refers to them if the leader of a job does not start."""

    def look() -> None:
        list(log_lines(run_dir, StoryClock(), lambda: True, None, None, None, follow))

    with pytest.raises(JobError, match="no agent of") as failed:
        look()
    assert failed.value.fix == "try again after the agents have started"
    run_dir.slurm.mkdir(parents=True)
    with pytest.raises(JobError, match="no agent of") as failed:
        look()
    assert str(run_dir.slurm) in failed.value.fix


@pytest.mark.parametrize("rank", [None, 0])
def test_the_logs_of_pods_that_are_gone_are_on_the_volume(
    run_dir: RunDir, rank: int | None
) -> None:
    """The directory is a copy on a machine without the volume; attempts ran."""
    submitted, *events = started()
    assert isinstance(submitted, JobSubmitted)
    launch = replace(submitted.launch, run_dir="/ndctl/runs/quickstart")
    submitted = replace(submitted, backend="kubernetes", launch=launch)
    run_dir.journal.write_bytes(b"".join(map(to_line, journal([submitted, *events]))))
    for lines in (
        agent_lines(run_dir, None),
        log_lines(run_dir, StoryClock(), lambda: True, rank, None, None, False),
    ):
        with pytest.raises(JobError, match="it has no pod whose output can be read") as gone:
            list(lines)
        assert "/ndctl/runs/quickstart/logs, on the volume" in gone.value.fix


def test_without_an_attempt_the_logs_of_agents_are_shown(run_dir: RunDir) -> None:
    log = run_dir.agent_log("node-1")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("ModuleNotFoundError: No module named 'x'\n")
    said = "[node-1 agent] ModuleNotFoundError: No module named 'x'"

    def lines(rank: int | None, follow: bool) -> list[str]:
        found = log_lines(run_dir, StoryClock(), lambda: True, rank, None, None, follow)
        return [str(line) for line in found]

    assert lines(None, follow=False) == lines(None, follow=True) == [said]
    with pytest.raises(JobError, match="no log of attempt 1, rank 0"):
        lines(0, follow=False)
    (run_dir.logs / "attempt-1").mkdir()
    with pytest.raises(JobError, match="the ranks of attempt 1 have written nothing yet") as early:
        lines(None, follow=False)
    assert "--follow` waits for them" in early.value.fix
    write(run_dir, 0, "step 1\n")
    assert lines(None, follow=False) == lines(None, follow=True) == ["[host-0 rank 0] step 1"]
    with pytest.raises(JobError, match="no log of attempt 1, rank 7") as absent:
        lines(7, follow=False)
    assert absent.value.fix == "attempts with logs: 1; attempt 1 has those of rank 0 on host-0"
