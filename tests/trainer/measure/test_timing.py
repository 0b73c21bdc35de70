"""Time of the parts of a step, on the host and in the queue of a device."""

from dataclasses import dataclass

import pytest

from trainer.measure.timing import Stopwatch


@dataclass
class Queue:
    """A device queue with one mark per second, which the device has executed up to `now`."""

    marks: int = 0
    now: float = 0.0

    def event(self) -> "Mark":
        return Mark(self)


@dataclass
class Mark:
    queue: Queue
    at: float = -1.0

    def record(self) -> None:
        self.queue.marks += 1
        self.at = float(self.queue.marks)

    def query(self) -> bool:
        return self.queue.now >= self.at

    def elapsed_time(self, end_event: "Mark") -> float:
        return 1e3 * (end_event.at - self.at)


def test_device_time_counts_after_the_device_has_finished() -> None:
    queue = Queue()
    watch = Stopwatch(queue.event)
    with watch.part("passes"):
        for _ in range(2):
            with watch.part("forward"):
                pass
    with watch.part("optimizer"):
        pass
    queue.now = 6.0
    assert watch.pop_seconds() == {"forward": 2.0, "passes": 5.0}
    assert watch.pop_seconds() == {}
    queue.now = 8.0
    assert watch.pop_seconds() == {"optimizer": 1.0}


def test_host_time_is_reported_once() -> None:
    times = iter((1.0, 2.0, 5.0, 7.0))
    watch = Stopwatch(clock=lambda: next(times))
    with watch.part("forward"), watch.host_part("data"):
        pass
    assert watch.pop_seconds() == {"data": 3.0, "forward": 6.0}
    assert watch.pop_seconds() == {}


def test_a_part_that_fails_is_not_counted() -> None:
    watch = Stopwatch()
    with pytest.raises(ValueError, match="no"), watch.part("forward"):
        raise ValueError("no")
    assert watch.pop_seconds() == {}


def test_own_work_is_the_time_between_two_collectives() -> None:
    queue = Queue()
    watch = Stopwatch(queue.event)
    watch.before_collective()
    assert watch.pop_seconds() == {}, "ignore_progress says when that began"
    watch.after_collective()
    watch.before_collective()
    watch.before_collective()
    queue.now = 2.0
    assert watch.pop_seconds() == {"own": 1.0}


def test_excluded_time_is_not_the_ranks_own_work() -> None:
    queue = Queue()
    watch = Stopwatch(queue.event)
    watch.after_collective()
    with watch.not_own_work():
        queue.marks += 100
    watch.before_collective()
    queue.now = 200.0
    assert watch.pop_seconds() == {"own": 2.0}, "a second before, and one after"


def test_on_the_host_time_is_read_from_the_clock() -> None:
    times = iter((10.0, 12.5))
    watch = Stopwatch(clock=lambda: next(times))
    watch.after_collective()
    watch.before_collective()
    assert watch.pop_seconds() == {"own": 2.5}
