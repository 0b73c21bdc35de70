import io
from datetime import UTC
from pathlib import Path

import pytest

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.messages.events import ProgramRuns
from orchestrator.dashboard.console import VisibleConsole, print_report
from orchestrator.dashboard.follow.follow import (
    Follower,
    Printed,
    entry_lines,
    metric_lines,
    summary_text,
)
from orchestrator.dashboard.metrics import Metric, Progress, fold_metrics
from orchestrator.dashboard.snapshot import Snapshot
from orchestrator.journal.journal import Entry
from tests.dashboard.dashboard_story import (
    START,
    finished,
    hung,
    journal,
    metric,
    metrics,
    recovered,
    seen_of,
    short_of_a_host,
    silent_program,
    started,
)
from tests.dashboard.test_status import failed


def after_restart(first: int, last: int) -> list[Metric]:
    return [metric(n, 2, START + 36 + 0.5 * (n - 20)) for n in range(first, last + 1)]


LINES = metrics(1, 24) + after_restart(21, 60)


def follower(terminal: bool = False, width: int = 100) -> tuple[Follower, io.StringIO]:
    out = io.StringIO()
    console = VisibleConsole(
        file=out,
        width=width,
        height=30,
        force_terminal=terminal,
        color_system=None,
        legacy_windows=False,
    )
    return Follower(console, UTC), out


def followed(entries: list[Entry], lines: list[Metric], terminal: bool = False) -> str:
    printer, out = follower(terminal)
    with printer:
        printer.feed(entries, lines)
    return out.getvalue()


def test_a_whole_job_is_shown_in_order() -> None:
    text = followed(journal(finished()), LINES)
    places = [
        text.index(words)
        for words in (
            "starting attempt 1 on 2 hosts from the beginning",
            "step 1/60  loss 5.5000",
            "step 12/60",
            "checkpoint step-20 is complete",
            "a drill fired on rank 1 at step 25",
            "incident 1, rank-killed (drill kill:rank=1@step=25): rank 1 was killed by SIGKILL",
            "culprit rank 1 on host-0, detected after 0.2 s; restart as attempt 2",
            "starting attempt 2 on 2 hosts from checkpoint step-20",
            "attempt 2 resumes from checkpoint step-20",
            "recovered from incident 1 after 7.0 s: attempt 2 trains",
            "step 60/60",
            "SUCCEEDED: all ranks finished in attempt 2",
        )
    ]
    assert places == sorted(places)


def test_a_cause_that_ends_the_job_is_told_once_before_the_end() -> None:
    lines = followed(journal(failed()), []).splitlines()
    told = next(at for at, line in enumerate(lines) if "incident 2, exception: " in line)
    decided = lines[told + 1]
    assert "boom" in lines[told]
    assert "boom" not in decided
    assert (
        "; stopped the job: the same error twice, so the program has a bug (rule repeated-error)"
        in decided
    )


def test_a_program_without_steps_has_recovered_when_its_ranks_run_again() -> None:
    text = followed(journal(silent_program(ProgramRuns(at=START + 60, attempt=2))), [])
    assert "recovered from incident 1 after 30 s: attempt 2 runs\n" in text


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_terminal_gets_lines_that_are_broken_between_words(width: int) -> None:
    printer, out = follower(terminal=True, width=width)
    entries = journal(finished())
    for entry in entries:  # without the progress bar, which is no text
        printer.printed, lines = entry_lines(printer.printed, entry, UTC)
        for line in lines:
            print_report(printer.console, line)
    shown = out.getvalue()
    assert shown.split() == followed(entries, []).split()
    longest_word = max(map(len, shown.split()))
    assert max(map(len, shown.splitlines())) <= max(width, longest_word + 4)


def test_about_a_tenth_of_the_steps_is_shown() -> None:
    text = followed(journal(started()), metrics(1, 60))
    assert 10 <= text.count("/60  loss") <= 12


def test_a_slow_step_is_shown_each_minute() -> None:
    printed, _ = entry_lines(Printed(), journal(started())[0], UTC)
    lines = []
    for number in range(1, 5):
        printed, news = metric_lines(printed, metric(number, at=START + 50 * number), UTC)
        lines += news
    assert [line.split()[4] for line in lines] == ["1/60", "3/60"]


def test_a_journal_read_in_parts_gives_the_same_incidents() -> None:
    entries = journal(finished())
    printer, out = follower()
    with printer:
        for entry in entries:
            printer.feed([entry], [])
    assert out.getvalue() == followed(entries, [])


def test_unchanged_facts_are_not_repeated() -> None:
    entries = journal(finished())
    printer, out = follower()
    with printer:
        printer.skip(entries[:-1], LINES)
        printer.feed(entries[-1:], [])
    assert out.getvalue() == "2023-11-14 22:14:42 UTC  SUCCEEDED: all ranks finished in attempt 2\n"


def test_a_hang_is_shown_when_it_is_detected() -> None:
    assert "collecting evidence: no progress for 10.5 s" in followed(journal(hung()), [])


def test_missing_hosts_are_shown_with_the_waiting_time() -> None:
    text = followed(journal(short_of_a_host()), metrics(1, 24))
    printed = (
        "waiting for hosts: 1 of 2 hosts available; if this does not change, ndctl releases all"
        " hosts at 2023-11-14 22:23:52 UTC and requeues the job"
    )
    assert f"2023-11-14 22:13:52 UTC {printed}" in " ".join(text.split())
    assert text.count("waiting for hosts") == 1


def test_on_a_terminal_a_bar_shows_the_progress() -> None:
    text = followed(journal(recovered()), metrics(1, 24), terminal=True)
    assert "RUNNING" in text
    assert "step 24/60  loss 2.7144  9,024 tokens/s  eta 0:28" in text
    assert "incident 1, rank-killed" in text
    assert "step 12/60" not in text


def test_the_bar_is_shown_before_the_first_step() -> None:
    assert "step 0/60" in followed(journal(started()[:1]), [], terminal=True)
    assert followed([], [], terminal=True).count("step") == 0


def summary(events: list[Entry], lines: list[Metric], alive: bool = False) -> str:
    shot = Snapshot(
        run_dir=RunDir(Path("/runs/quickstart")),
        seen=seen_of(entry.event for entry in events),
        progress=fold_metrics(Progress(), lines),
        leader_alive=alive,
        now=START + 100,
    )
    return summary_text(shot, UTC)


def test_the_summary_shows_the_result_of_the_job() -> None:
    text = summary(journal(finished()), LINES)
    for words in (
        "quickstart: SUCCEEDED",
        "60 of 60",
        "5.5000 -> 2.4518",
        "1 min 22 s",
        "/runs/quickstart/checkpoints/step-60",
        "2023-11-14 22:13:50 UTC rank-killed: rank 1 was killed by SIGKILL"
        " [drill kill:rank=1@step=25]",
        "detected after 0.2 s, recovered after 7.0 s",
        "ndctl describe quickstart",
    ):
        assert words in text, words


def test_the_summary_of_a_lost_job_shows_how_to_resume() -> None:
    text = summary(journal(recovered()), metrics(1, 24))
    assert "ndctl submit /runs/quickstart/spec.yaml --resume" in text
