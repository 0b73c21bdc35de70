"""Calls that hang keep their threads, and the other calls go on."""

import threading
import time
from functools import partial

import pytest

from orchestrator.posix.crew import MOST_HANGING, Crew

LONG_S = 60.0


def test_calls_run_at_the_same_time() -> None:
    together, crew = threading.Barrier(4), Crew(size=4)
    for number in range(4):
        crew.give(number, lambda: together.wait(LONG_S))
    crew.wait(LONG_S)
    assert together.broken is False
    assert together.n_waiting == 0


def test_calls_that_hang_delay_no_other() -> None:
    hang, done, crew = threading.Event(), list[int](), Crew(size=2, slow_s=0.05)
    for number in range(5):
        crew.give(f"hangs {number}", lambda: hang.wait(LONG_S))
    for number in range(100):
        crew.give(number, partial(done.append, number))
    while len(done) < 100:  # on a busy machine short calls take longer than `slow_s` as well
        crew.wait(LONG_S)
    assert sorted(done) == list(range(100))
    assert crew.busy_s("hangs 0") > 0
    assert crew.busy_s(0) == 0
    began = time.monotonic()
    crew.wait(LONG_S)  # what hangs already is not waited for
    assert time.monotonic() - began < LONG_S / 2
    hang.set()


def test_a_call_is_given_once_until_it_has_ended() -> None:
    hang, calls, crew = threading.Event(), list[int](), Crew(slow_s=0.01)

    def call() -> None:
        calls.append(1)
        hang.wait(LONG_S)

    for _ in range(3):
        crew.give("job", call)
        crew.wait(0.05)
    assert calls == [1]
    hang.set()
    while crew.busy_s("job"):
        time.sleep(0.001)
    crew.give("job", call)
    while crew.unfinished():
        time.sleep(0.001)
    assert calls == [1, 1]


def test_the_number_of_threads_is_limited() -> None:
    hang, crew, before = (
        threading.Event(),
        Crew(size=2, slow_s=0.01, most=6),
        threading.active_count(),
    )
    for number in range(50):
        crew.give(number, lambda: hang.wait(LONG_S))
    crew.wait(LONG_S)  # it ends, because every thread hangs
    assert threading.active_count() - before <= 6
    hang.set()
    while crew.unfinished():
        time.sleep(0.001)
    assert crew.busy_s(49) == 0


def test_storage_that_is_lost_takes_few_threads_and_is_used_once_it_is_back() -> None:
    hang, done, crew = threading.Event(), list[int](), Crew(size=2, slow_s=0.01)
    for number in range(500):
        crew.give(f"lost {number}", lambda: hang.wait(LONG_S), "lost")
    for number in range(50):
        crew.give(number, partial(done.append, number), "good")
    while len(done) < 50:
        crew.wait(LONG_S)
    assert sorted(done) == list(range(50))
    assert (crew.is_lost("lost"), crew.is_lost("good")) == (True, False)
    assert MOST_HANGING <= len(crew.unfinished()) <= MOST_HANGING + 2
    hang.set()
    while crew.unfinished():
        time.sleep(0.001)
    crew.give("lost 1", lambda: done.append(1), "lost")
    while crew.unfinished():
        time.sleep(0.001)
    assert len(done) == 51


def test_an_error_ends_no_other_call(caplog: pytest.LogCaptureFixture) -> None:
    crew, done = Crew(size=1), list[int]()
    crew.give("bad", lambda: 1 / 0)
    crew.give("good", lambda: done.append(1))
    crew.wait(LONG_S)
    assert done == [1]
    assert "the call bad failed" in caplog.text
