import io
import re
from datetime import UTC

import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from rich.console import Console

from orchestrator.contract.messages.events import (
    HangJudged,
    HealthChanged,
    HostStopped,
    ProgramRuns,
    StepReached,
    TrainingResumed,
)
from orchestrator.dashboard.job_view.view import View, view
from orchestrator.dashboard.metrics import NO_PROGRESS, fold_metrics
from orchestrator.dashboard.screen.chart import Marks, axis, chart, resample
from orchestrator.dashboard.screen.screen import draw
from orchestrator.dashboard.time_spent.account import TimeSpent
from orchestrator.diagnosis.cause.verdict import Culprit
from orchestrator.seams import LaunchStatus
from tests.dashboard.dashboard_story import (
    DRILL,
    SLOW,
    START,
    broken,
    finished,
    hung,
    metrics,
    recovered,
    restarting,
    seen_of,
    short_of_a_host,
    silent_program,
    started,
    submitted,
    view_of,
)

SIZES = [(80, 24), (120, 40), (200, 60)]


def trouble(rank: int, word: str) -> HealthChanged:
    alone = ((rank, rank),)
    return HealthChanged(at=START + 20, attempt=1, ranks=alone, health=word, age_s=6)  # type: ignore[arg-type]


def many_incidents() -> View:
    shown = view_of(recovered(), metrics(1, 24))
    incident = replace(shown.incidents[0], cause="long words " * 40)
    return replace(shown, incidents=tuple(replace(incident, id=n) for n in range(1, 30)))


SCENES = {
    "submitted": view_of([submitted()], now=START + 1),
    "waiting": view_of(started()[:3], now=START + 4),
    "running": view_of(started(drills=(DRILL,), spares=1), metrics(1, 24), now=START + 28),
    "broken": view_of(broken(), metrics(1, 24), now=START + 31),
    "restarting": view_of(restarting(), metrics(1, 24), now=START + 33),
    "hung": view_of(hung(), metrics(1, 12), now=START + 61),
    "short of a host": view_of(short_of_a_host(), now=START + 60),
    "finished": view_of(finished(), metrics(1, 24) + metrics(21, 60, 2), now=START + 100),
    "leaderless": view_of(recovered(), metrics(1, 30), now=START + 900, leader_alive=False),
    "many incidents": many_incidents(),
    "256 hosts": view_of(
        [*started(256, 8, spares=2), trouble(77, "silent"), trouble(1999, "slow")], metrics(1, 34)
    ),
    "2048 hosts": view_of(started(2048, 8), metrics(1, 34)),
    "64 ranks a host": view_of(started(300, 64)),
    "long names": replace(view_of(started()), name="n" * 63, reason="why " * 60, state="FAILED"),
}


def text_of(shown: View, width: int, height: int) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, color_system=None)
    console.print(draw(shown, width, height, UTC))
    return out.getvalue()


@pytest.mark.parametrize(("width", "height"), [*SIZES, (40, 10), (20, 5), (12, 3), (1, 1)])
@pytest.mark.parametrize("scene", SCENES)
def test_a_frame_fills_its_screen_exactly(scene: str, width: int, height: int) -> None:
    lines = text_of(SCENES[scene], width, height).split("\n")
    assert lines.pop() == ""
    assert len(lines) == height
    assert {cell_len(line) for line in lines} == {width}


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_screen_of_a_running_job_has_all_parts(width: int, height: int) -> None:
    text = text_of(SCENES["running"], width, height)
    for words in (
        "quickstart",
        "● RUNNING",
        "attempt 1",
        "step 24/60",
        "loss 2.7144",
        "9,024 tokens/s",
        "eta 0:28",
        "elapsed 0:28",
        "host-0  ● 0  ● 1   dp_shard 0, tp 0-1",
        "● 4 ok",
        "incidents  none",
        "checkpoint  none yet",
        "kill:rank=1@step=25 armed",
        "1 host: host-2",
        "q quit",
    ):
        assert words in text, words


def test_a_job_without_enough_hosts_shows_its_waiting_time_and_commands() -> None:
    text = text_of(view_of(short_of_a_host(), now=START + 60), 120, 40)
    assert "1 of 2 registered" in text
    assert (
        "if no hosts arrive, ndctl releases all hosts at 2023-11-14 22:23:52 UTC; to give up:"
        " ndctl cancel quickstart" in text
    )
    assert "releases all" not in text_of(SCENES["restarting"], 120, 40)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_an_incident_shows_culprit_cause_and_action(width: int, height: int) -> None:
    lines = text_of(SCENES["finished"], width, height).split("\n")
    left = [line[: width * 11 // 20 - 1] for line in lines] if width > 80 else []
    text = " ".join(" ".join([*lines, *left]).split())
    for words in (
        "✓ SUCCEEDED",
        "1 restart",
        "rank-killed drill rank 1 on host-0",
        "rank 1 was killed by SIGKILL",
        "restart as attempt 2 from checkpoint step-20",
        "detected after 0.2 s, recovered after 7.0 s",
        "step-60 is complete",
        "✓ 4 done",
    ):
        assert words in text, words


def test_a_dead_rank_is_visible_without_colour() -> None:
    text = text_of(SCENES["broken"], 80, 24)
    assert "host-0  ● 0  ✗ 1" in text
    assert "✗ 1 dead" in text
    assert "collecting evidence of a new one" in text


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_straggler_is_marked_and_counted(width: int, height: int) -> None:
    shown = view_of([*started(), SLOW], metrics(1, 12))
    text = text_of(shown, width, height)
    assert "host-1  ● 2  ▲ 3" in text
    assert "▲ 1 straggler   ● 3 ok" in text
    late = view_of([*started(), SLOW, trouble(3, "silent")], metrics(1, 12))
    assert "host-1  ● 2  ○ 3" in text_of(late, width, height), "what is worse is shown"
    over = view_of([*started(), SLOW], metrics(1, 12), now=START + 900, leader_alive=False)
    assert "▲" not in text_of(over, width, height)


def judged(*ranks: int) -> HangJudged:
    return HangJudged(
        at=START + 63,
        attempt=1,
        verdict="never-entered",
        cause="rank 3 did not call the operation in which the others wait",
        scope="rank",
        ranks=ranks,
        hosts=(),
        confidence=0.97,
    )


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_culprit_is_marked_from_the_verdict_until_the_job_trains_again(
    width: int, height: int
) -> None:
    silent = [trouble(rank, "silent") for rank in range(4)]
    story = [*hung()[:-1], *silent, hung()[-1]]
    assert "◆" not in text_of(view_of(story, metrics(1, 12)), width, height)
    story.append(judged(3))
    text = text_of(view_of(story, metrics(1, 12)), width, height)
    assert "host-1  ○ 2  ◆ 3" in text
    assert "◆ 1 culprit   ○ 3 no heartbeat" in text
    story += [
        HostStopped(at=START + 64, attempt=1, host=host, finished=False)
        for host in ("host-0", "host-1")
    ]
    story += [
        TrainingResumed(at=START + 68, attempt=2, step=0),
        StepReached(at=START + 69, attempt=2, step=1, loss=5.0, tokens_per_second=1.0),
    ]
    assert "◆" not in text_of(view_of(story, metrics(1, 12)), width, height)


def test_without_a_culprit_no_rank_is_marked() -> None:
    shown = view_of([*hung(), judged()], metrics(1, 12))
    assert "culprit" not in text_of(shown, 120, 40)


def test_a_job_without_a_leader_shows_the_resume_command() -> None:
    text = text_of(SCENES["leaderless"], 80, 24)
    assert "✗ FAILED" in text
    assert "fix: ndctl submit SPEC --resume" in text


def test_hosts_with_problems_come_first_and_the_rest_is_counted() -> None:
    lines = text_of(SCENES["256 hosts"], 80, 24).split("\n")
    assert lines[3].startswith("─ ranks  2,048 on 256 hosts   ○ 1 no heartbeat   ◐ 1 late heart")
    assert lines[4].rstrip() == "  ● 2,046 ok", "no count is cut"
    assert lines[5].startswith("  host-009  ● 72    ● 73    ● 74    ● 75    ● 76    ○ 77    ● 78")
    assert lines[6].startswith("  host-249  ● 1992  ● 1993")
    assert lines[7].startswith("  host-000 " + "●" * 9 + "○" + "●" * 50)
    assert "… 2,048 hosts, all ok" in text_of(SCENES["2048 hosts"], 80, 24)


def test_on_a_small_screen_hosts_in_trouble_come_before_curves() -> None:
    bad = [trouble(8 * host, "silent") for host in range(20, 60, 4)]
    slow = replace(SLOW, rank=333, host="host-041")
    story = [*started(500, 8, spares=4, drills=(DRILL,)), *bad, slow]
    spent = TimeSpent(elapsed_s=75.0, lost_s={"restart": 7.0})
    text = text_of(replace(view_of(story, metrics(1, 34)), time=spent), 80, 23)
    assert text.count("\n  host-") == 4
    assert "… 496 more hosts, 6 no heartbeat, 1 straggler, 489 ok" in text
    assert "─ loss" in text
    assert "─ tokens/s" not in text


def test_the_cause_of_a_hang_is_shown_from_its_verdict_on() -> None:
    shown = view_of([*hung(), judged(3)], metrics(1, 12))
    for width, height in SIZES:
        words = " ".join(text_of(shown, width, height).split())
        assert "✗ rank 3 did not call the operation in which the others wait" in words


def test_the_sentence_about_an_open_incident_is_whole_on_a_small_screen() -> None:
    shown = view_of(restarting(), metrics(1, 24))
    (incident,) = shown.incidents
    long = replace(incident, cause="no rank made progress; " * 7 + "that is all")
    text = text_of(replace(shown, incidents=(long,)), 80, 24)
    assert "that is all" in " ".join(text.split())
    assert "─ loss" in text


def test_no_column_of_a_wide_screen_is_empty() -> None:
    lines = [replace(one, mfu=0.3 + one.step / 100, data_s=one.step / 100) for one in metrics(1, 9)]
    many = [replace(one, grad_norm=2.0 / one.step, gpu_power_w=9.0 * one.step) for one in lines]
    rows = text_of(view_of(started(), many), 200, 60).split("\n")[6:-1]
    # A curve has at most 16 lines, and no column has more than two of these five.
    assert sum(not row[:100].strip() for row in rows) <= 20
    assert sum(not row[112:].strip() for row in rows) <= 20


def test_a_wide_screen_has_all_2048_hosts() -> None:
    text = text_of(SCENES["2048 hosts"], 200, 60)
    assert text.count("●") >= 2048


def test_hosts_without_trouble_share_lines_in_their_order() -> None:
    shown = view_of([*started(30, 8), trouble(77, "silent")])
    text = text_of(shown, 120, 40)
    places = [text.index(f"host-{number:02}") for number in range(30) if number != 9]
    assert places == sorted(places)
    assert text.index("host-09") < places[0]


def test_ranks_that_do_not_fit_are_counted() -> None:
    many = view_of([*started(300, 64), trouble(77, "silent")])
    assert "○1 ●63" in text_of(many, 60, 24)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_no_fact_is_cut_while_rows_are_empty(width: int, height: int) -> None:
    slow = [replace(SLOW, rank=rank, at=START + 20 + rank) for rank in (1, 3)]
    shown = view_of([*started(spares=3), *slow], metrics(1, 12))
    text = text_of(shown, width, height)
    facts = text.partition("checkpoint")[2].partition("─ loss")[0]
    assert "…" not in facts if width > 80 else "drills" not in facts
    words = " ".join(line[-width * 9 // 20 :] for line in text.split("\n")) if width > 80 else text
    words = " ".join(words.split())
    for host, rank in (("host-1", 1), ("host-1", 3)):
        assert f"{host}: rank {rank} takes 0.350 s of its own a step" in words


def test_a_long_fact_gets_the_rows_that_are_left_although_another_one_is_cut() -> None:
    slow = [replace(SLOW, rank=rank, at=START + 20 + rank) for rank in (1, 3)]
    shown = view_of([*started(spares=3), *slow], metrics(1, 12))
    text = text_of(shown, 60, 18)
    assert "─ straggler ──" in text
    assert "    host-1: rank 1 takes 0.350 s of its own a step, its" in text
    assert "─ straggler  host-1: rank 3 takes 0.350 s of its own a st…──" in text


def test_a_chart_marks_restarts_and_checkpoints_at_their_steps() -> None:
    assert axis(1, 11, Marks(saved=(1, 6), resumed=(7,)), 10).plain == "◇───◇↻────"
    assert axis(1, 11, Marks(saved=(12, 0)), 10).plain == "─" * 10
    assert axis(5, 5, Marks(saved=(5,)), 3).plain == "◇──"
    shown = view_of(recovered(), [*metrics(1, 24), *metrics(21, 30, 2)])
    text = text_of(replace(shown, saved_steps=(20,)), 120, 40)
    assert re.search("◇─*↻", text)
    assert "◇ checkpoint   ↻ restart" in text_of(replace(shown, saved_steps=(20,)), 200, 60)


def test_a_program_without_steps_has_no_step_0() -> None:
    text = text_of(view_of(silent_program(ProgramRuns(at=START + 60, attempt=2))), 80, 24)
    assert " no step reported    elapsed" in text
    assert "step 0" not in text
    assert "all ranks ran again after 30 s" in " ".join(text.split())


def test_a_long_cause_is_cut_and_not_what_ndctl_did_and_how_long_it_took() -> None:
    shown = SCENES["finished"]
    (incident,) = shown.incidents
    long = replace(incident, cause="long words " * 60)
    lines = text_of(replace(shown, incidents=(long,)), 120, 40).split("\n")
    text = " ".join(" ".join(line[:65] for line in lines).split())
    for words in (
        "long words long …",
        "… restart as attempt 2 from checkpoint step-20",
        "detected after 0.2 s, recovered after 7.0 s",
    ):
        assert words in text, words


def test_the_newest_incident_comes_first_and_the_rest_is_counted() -> None:
    text = text_of(SCENES["many incidents"], 80, 24)
    assert "incidents  29" in text
    assert "earlier: ndctl describe quickstart" in text


def test_text_of_a_rank_cannot_control_the_terminal() -> None:
    shown = SCENES["finished"]
    evil = replace(shown.incidents[0], cause="\x1b[2Jboo\x1b]0;title\x07 [bold]x[/bold]\nnext")
    text = text_of(replace(shown, incidents=(evil,)), 80, 24)
    assert "\x1b" not in text
    assert "\\x1b[2Jboo\\x1b]0;title\\x07 [bold]x[/bold] next" in text


def test_a_chart_spans_its_lowest_to_its_highest_value() -> None:
    assert chart([(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)], 4, 1) == ["█▆▃▁"]
    assert chart([(1, 4.0), (2, 1.0)], 2, 2) == ["█ ", "█▁"]


def test_a_chart_can_have_one_value_or_no_value() -> None:
    assert chart([(1, 2.0)], 3, 1) == ["▄▄▄"]
    assert chart([], 3, 2) == ["   ", "   "]


def test_a_chart_shows_the_mean_of_points_in_one_column() -> None:
    assert resample([(step, float(step)) for step in range(1, 101)], 2) == [25.5, 75.5]


def test_a_narrow_screen_keeps_the_bar_and_drops_the_times() -> None:
    text = text_of(SCENES["running"], 40, 12)
    assert "━" in text
    assert "elapsed" not in text
    assert "40%" in text


def test_a_culprit_of_an_earlier_larger_plan_is_not_in_the_mesh() -> None:
    shown = SCENES["finished"]
    old = replace(shown.incidents[0], culprit=Culprit(host="host-9", rank=99))
    text = text_of(replace(shown, incidents=(old,)), 80, 24)
    assert "rank 99 on host-9 " in text


def test_a_job_without_new_steps_shows_for_how_long() -> None:
    shown = view_of(started(), metrics(1, 24), now=START + 90)
    assert "last step 1 min 03 s ago" in text_of(shown, 120, 40)


def test_an_unknown_state_is_shown_with_its_age_and_the_reason() -> None:
    seen = seen_of(recovered())
    away = LaunchStatus("PyTorchJob a/b", held=True, unknown="the API server cannot be reached")
    shown = view(
        seen,
        fold_metrics(NO_PROGRESS, metrics(1, 30)),
        leader_alive=False,
        now=seen.run.last_at + 200,
        launch_status=away,
    )
    text = draw(shown, 100, 30, UTC).plain
    assert "RUNNING   3 min 20 s ago" in text
    assert "the API server cannot be reached" in text


def test_a_narrow_screen_keeps_the_time_and_drops_the_attempt() -> None:
    shown = replace(SCENES["short of a host"], name="a-job", restarts=3)
    stage = "waiting for agents, 1 of 2 registered"
    for width, said, time in (
        (200, f"{stage} · attempt 1 · 3 restarts", "2023-11-14 22:14:20 UTC"),
        (90, f"{stage} · attempt 1", "22:14:20"),
        (80, stage, "22:14:20"),
    ):
        line = draw(shown, width, 24, UTC).plain.partition("\n")[0]
        assert re.fullmatch(f" a-job  ◐ RECOVERING   {said} +{time} ", line), line
