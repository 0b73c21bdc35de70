from collections.abc import Container
from dataclasses import replace

from trainer.checkpoint.schedule import AT_START, Resumed, Schedule


def saves(every: int, steps: int, failing: Container[int]) -> list[int]:
    """Steps at which a save starts, if the saves at the `failing` steps fail at once."""
    schedule, begun = Schedule(every), []
    for step in range(1, steps + 1):
        if schedule.due(step):
            schedule = schedule.begun(step)
            begun.append(step)
            if step in failing:
                schedule = schedule.failed(step)
    return begun


def test_saves_are_regular_while_they_succeed() -> None:
    assert saves(10, 35, failing=()) == [10, 20, 30]


def test_a_failed_save_is_retried_after_1_2_4_steps_until_the_next_regular_one() -> None:
    assert saves(10, 21, failing=range(10, 20)) == [10, 11, 13, 17, 20]


def test_no_retry_follows_a_successful_one() -> None:
    assert saves(10, 20, failing=(10, 11)) == [10, 11, 13, 20]


def test_the_next_regular_save_starts_over() -> None:
    assert saves(10, 29, failing=range(10, 24)) == [10, 11, 13, 17, 20, 21, 23, 27]


def test_a_save_of_every_step_needs_no_retry() -> None:
    assert saves(1, 4, failing=(2,)) == [1, 2, 3, 4]


def test_a_failure_that_is_known_late_is_retried_from_that_step() -> None:
    schedule = Schedule(10).begun(10).failed(13)
    assert [step for step in range(13, 20) if schedule.due(step)] == [14]


def test_an_interval_that_may_change_counts_from_the_last_regular_save() -> None:
    schedule = Schedule(10, since=7)  # resumed from the checkpoint of step 7
    assert not schedule.due(10)
    assert schedule.due(17)
    schedule = replace(schedule.begun(17), every=4)
    assert next(step for step in range(18, 26) if schedule.due(step)) == 21
    assert schedule.next_due(18) == 21
    assert replace(schedule, every=2).due(20), "a save that is overdue by the new interval is made"


def test_a_retry_does_not_move_the_regular_saves() -> None:
    schedule = Schedule(10, since=0).begun(10).failed(10)
    assert schedule.next_due(10) == 11
    schedule = schedule.begun(11)
    assert schedule.next_due(11) == 20


def test_a_save_that_is_asked_for_is_due_at_once_but_not_twice() -> None:
    schedule = Schedule(10).asked(4)
    assert [step for step in range(4, 12) if schedule.due(step)] == [4, 10]
    begun = schedule.begun(4)
    assert begun.asked(6) == begun, "the agent of another host was late"
    assert begun.asked(8).due(8)
    assert begun.next_due(4) == 10
    assert Schedule(10).begun(10).asked(12).next_due(12) == 20
    assert Schedule(10, last=24).failed(24).next_due(24) == 24, "no step follows the last one"


def test_a_save_that_was_cut_off_is_made_up_for_after_a_resume_from_memory() -> None:
    every = Schedule(50)
    assert every.after(AT_START) == every
    assert every.after(Resumed(99, 50)) == every
    late = every.after(Resumed(103, 50))
    assert [step for step in range(104, 160) if late.due(step)] == [104, 150]
    assert not late.begun(104).due(105)
    changing = Schedule(50, since=Resumed(103, 50).saved)
    assert changing.due(104)


def test_a_save_is_urgent_if_it_was_asked_for_or_is_tried_again() -> None:
    schedule = Schedule(10)
    assert not schedule.is_urgent(10)
    assert schedule.asked(4).is_urgent(4)
    assert schedule.asked(10).is_urgent(10)
    assert schedule.begun(10).failed(12).is_urgent(13)


def test_half_of_the_interval_counts_from_the_last_save() -> None:
    schedule = Schedule(9)
    assert not schedule.is_half_over(8), "there was none"
    begun = schedule.begun(9)
    assert next(step for step in range(10, 18) if begun.is_half_over(step)) == 14
