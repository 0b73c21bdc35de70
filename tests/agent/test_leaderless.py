"""Agents whose leader is gone, and a scheduler that answers late, refuses, or has ended the job."""

import errno
import fcntl
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest

from orchestrator.agent.leaderless import (
    GIVEN_UP_S,
    LOOK_S,
    REFUSED_S,
    STRANGER_S,
    TURN_S,
    UNLED,
    Following,
    queue_again,
)
from orchestrator.agent.whereabouts import Term
from orchestrator.contract.events import (
    AgentLost,
    AgentRegistered,
    CancelRequested,
    Event,
    HealthChanged,
    HostUnavailable,
    LeaderStarted,
)
from orchestrator.contract.fence import Fence, write_fence
from orchestrator.contract.launch import Allocation, LaunchPlan
from orchestrator.contract.rundir import RunDir
from orchestrator.errors import BackendError, Ended, Unanswered
from orchestrator.locks import is_free
from orchestrator.supervise import snapshot
from orchestrator.supervise.log import Journal
from orchestrator.supervise.loop import Supervisor
from orchestrator.system import SystemClock
from tests.agent.world import LAUNCH, FakeBackend, TurnedClock, a_job

TERM = Term(LAUNCH)
SILENT = Unanswered("Slurm does not answer `scontrol show job`: Socket timed out")
REFUSES = BackendError("Slurm refuses `scontrol requeue 1`: Requested operation is disabled")


@dataclass
class Queue(FakeBackend):
    """A scheduler that says what it is told to before it takes the job back."""

    says: Callable[[int], BackendError | None] = lambda before: None
    before_each: Callable[[], None] = field(default=lambda: None)
    granted: tuple[str, ...] = ("host-0", "host-1")

    def requeue(
        self,
        launch: LaunchPlan,
        exclude: Sequence[str],
        *,
        again: Sequence[str] = (),
        whole: bool = True,
    ) -> None:
        self.before_each()
        trouble = self.says(len(self.requeued))
        self.requeued.append(tuple(exclude))
        if trouble is not None:
            raise trouble

    def allocation(self, launch: LaunchPlan) -> Allocation:
        return Allocation(id="7", restarts=0, hosts=self.granted)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path)
    run_dir.logs.mkdir()
    write_fence(run_dir.fence, Fence(leader="the former", attempt=1))
    append(run_dir, a_job(tmp_path), began("host-0"))
    return run_dir


def began(host: str, restarts: int = 0) -> LeaderStarted:
    granted = Allocation(id="7", restarts=restarts, hosts=("host-0", "host-1"))
    return LeaderStarted(at=time.time(), host=host, pid=1, allocation=granted)


def append(run_dir: RunDir, *happened: Event) -> None:
    with Journal(run_dir.journal, SystemClock()) as journal:
        supervisor = Supervisor(journal)
        for event in happened:
            supervisor.feed(event)


def asked(run_dir: RunDir, queue: Queue, term: Term = TERM) -> float:
    """The seconds that it took."""
    clock = TurnedClock()
    begun = clock.time
    queue_again(run_dir, term, "host-1", lambda name: queue, clock)
    return clock.time - begun


def test_a_scheduler_that_does_not_answer_is_asked_for_hours(run_dir: RunDir) -> None:
    queue = Queue(says=lambda before: SILENT if before < 800 else None)
    assert asked(run_dir, queue) > 3600
    assert queue.requeued == [("host-0",)] * 801


def test_one_that_refuses_at_first_takes_the_job_when_it_can(run_dir: RunDir) -> None:
    queue = Queue(says=lambda before: REFUSES if before < 3 else None)
    asked(run_dir, queue)
    assert len(queue.requeued) == 4


def test_one_that_goes_on_refusing_is_left_with_what_to_type(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    queue = Queue(says=lambda before: SILENT if before == 1 else REFUSES)
    assert REFUSED_S <= asked(run_dir, queue) < REFUSED_S + 60 + LOOK_S
    last = caplog.messages[-1]
    assert "`ndctl cancel job`" in last
    assert "--resume" in last
    assert "Requested operation is disabled" in last
    assert len(caplog.messages) == len(queue.requeued), "each answer is told"


def test_a_job_that_the_scheduler_has_ended_is_let_go(run_dir: RunDir) -> None:
    queue = Queue(says=lambda before: Ended("Slurm job 1 has ended"))
    assert asked(run_dir, queue) == LOOK_S
    assert len(queue.requeued) == 1


def test_a_fence_that_cannot_be_read_is_read_again(run_dir: RunDir) -> None:
    class Disk(TurnedClock):
        """Comes back when somebody waits."""

        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if run_dir.fence.is_dir():
                run_dir.fence.rmdir()
                write_fence(run_dir.fence, Fence(leader="the former", attempt=1))

    run_dir.fence.unlink()
    run_dir.fence.mkdir()
    queue = Queue()
    queue_again(run_dir, TERM, "host-1", lambda name: queue, Disk())
    assert queue.requeued == [("host-0",)]


def ended_by_a_person(run_dir: RunDir) -> None:
    append(run_dir, CancelRequested(at=time.time(), by="me"))


def led_by_another(run_dir: RunDir) -> None:
    write_fence(run_dir.fence, Fence(leader="the next", attempt=2))


def submitted_again(run_dir: RunDir) -> None:
    append(run_dir, CancelRequested(at=time.time(), by="me"))
    job = a_job(run_dir.path)
    launch = LaunchPlan(
        job="job",
        run_dir=str(run_dir.path),
        launch=LAUNCH + 1,
        hosts=job.launch.hosts,
        devices_per_host=1,
        agent_timeout=10.0,
    )
    append(run_dir, a_job(run_dir.path, launch=launch))


@pytest.mark.parametrize("happens", [ended_by_a_person, led_by_another, submitted_again])
def test_a_job_that_is_not_ours_any_more_is_let_go(
    run_dir: RunDir, happens: Callable[[RunDir], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    queue = Queue(says=lambda before: SILENT)
    queue.before_each = lambda: happens(run_dir)
    asked(run_dir, queue)
    assert len(queue.requeued) == 1
    assert "not queued again" in caplog.messages[-1]


def test_agents_ask_one_after_the_other(run_dir: RunDir) -> None:
    queue = Queue()
    queue.before_each = lambda: _assert_held(run_dir)
    with run_dir.requeue_lock.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        # The other died on a host whose locks its file server keeps: this one goes on without it.
        assert asked(run_dir, queue) >= TURN_S
    asked(run_dir, queue)
    assert len(queue.requeued) == 2
    assert is_free(run_dir.requeue_lock)


def _assert_held(run_dir: RunDir) -> None:
    assert not is_free(run_dir.requeue_lock)


def test_those_whose_turn_it_is_not_leave_a_silent_journal_alone(run_dir: RunDir) -> None:
    """Thousands wait, and it may have hundreds of megabytes. What one finds is for all to know."""
    queue, term = Queue(), Term(LAUNCH, UNLED)
    asked(run_dir, queue, term)
    mark = run_dir.requeue_lock.read_text()
    assert mark, "no leader began in three runs: that is settled"
    run_dir.requeue_lock.write_text("")
    run_dir.journal.write_text("nobody can read this\n")
    with run_dir.requeue_lock.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def settles() -> None:
            other.write(mark)
            other.flush()

        clock = Writing(settles, 100.0)
        begun = clock.time
        queue_again(run_dir, term, "host-1", lambda name: queue, clock)
    assert 100.0 <= clock.time - begun < TURN_S
    assert queue.requeued == []


def test_one_whose_turn_it_is_not_looks_when_a_leader_writes(run_dir: RunDir) -> None:
    """Then it is perhaps this host alone that was cut off."""
    here(run_dir, "host-0", "host-1", "host-2")
    stack, queue = ExitStack(), Queue()

    def writes() -> None:
        append(run_dir, lost("host-1"), gone_on())
        stack.enter_context(led(run_dir))

    clock = Writing(writes, 100.0)
    begun = clock.time
    with stack, run_dir.requeue_lock.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        queue_again(run_dir, TERM, "host-1", lambda name: queue, clock)
    assert 100.0 <= clock.time - begun < TURN_S
    assert queue.requeued == []


def test_a_further_look_reads_what_the_journal_has_gained(run_dir: RunDir) -> None:
    here(run_dir, "host-0", "host-1")
    following = Following(run_dir, "host-1")
    before = following.look()
    append(run_dir, lost("host-1"), gone_on())
    read = run_dir.journal.read_bytes()
    lines = read.splitlines(keepends=True)
    garbled = [b"#" * (len(line) - 1) + b"\n" for line in lines[: before.lines]]
    run_dir.journal.write_bytes(b"".join([*garbled, *lines[before.lines :]]))
    now = following.look()
    assert (before.given_up, now.given_up) == (False, True)
    assert now.lines == len(lines)
    run_dir.journal.write_bytes(b"".join(lines[: before.lines]))
    assert following.look() == before, "of another run, which --new began, all is read"


def test_a_first_look_goes_on_from_the_leaders_snapshot(run_dir: RunDir) -> None:
    here(run_dir, "host-0", "host-1")
    append(run_dir, lost("host-1"))
    whole = Following(run_dir, "host-1").look()
    with Journal(run_dir.journal, SystemClock()) as journal:
        snapshot.write(run_dir, Supervisor(journal).folded, lambda: None)
    lines = run_dir.journal.read_bytes().splitlines(keepends=True)
    garbled = b"".join(b"#" * (len(line) - 1) + b"\n" for line in lines[:-1])
    seen = run_dir.state.read_bytes()
    assert Following(run_dir, "host-1").look() == whole, "and by the same last word on this host"
    run_dir.journal.write_bytes(garbled + lines[-1])
    head, _, rest = seen.partition(b"\n")
    before = sha256((garbled + lines[-1])[-snapshot.BEFORE :]).hexdigest()
    run_dir.state.write_bytes(
        json.dumps(json.loads(head) | {"before": before}).encode() + b"\n" + rest
    )
    assert Following(run_dir, "host-1").look() == whole, "nothing before it is read"


# No leader begins


@pytest.mark.parametrize("granted", [("host-2", "host-1"), ("host-1", "host-2")])
def test_where_no_leader_began_the_one_before_is_not_to_blame(
    run_dir: RunDir, granted: tuple[str, ...]
) -> None:
    """But the host that should have led, unless that is the one that asks."""
    queue = Queue(granted=granted)
    asked(run_dir, queue, Term(LAUNCH, restarts=1))
    assert queue.requeued == [tuple(host for host in granted[:1] if host != "host-1")]


def test_after_some_runs_in_which_none_began_the_job_is_not_queued_again(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    queue = Queue()
    for restarts in range(1, UNLED):
        asked(run_dir, queue, Term(LAUNCH, restarts))
    assert len(queue.requeued) == UNLED - 1
    asked(run_dir, queue, Term(LAUNCH, UNLED))
    assert len(queue.requeued) == UNLED - 1
    assert f"no leader has begun in {UNLED} allocations in a row" in caplog.messages[-1]
    write_fence(run_dir.fence, Fence(leader="a late one", attempt=1))
    append(run_dir, began("host-0", UNLED))
    asked(run_dir, queue, Term(LAUNCH, UNLED))
    assert queue.requeued[-1] == ("host-0",)


# A host that was cut off from a leader that lives, or died meanwhile


@contextmanager
def led(run_dir: RunDir) -> Iterator[None]:
    """A leader lives: it has the journal's lock, which the kernel would let go of with it."""
    with run_dir.journal.open("a") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        yield


def here(run_dir: RunDir, *hosts: str) -> None:
    for name in hosts:
        came = AgentRegistered(
            at=time.time(), host=name, address="::1", devices=1, pid=1, incarnation=name
        )
        append(run_dir, came)


def lost(name: str) -> AgentLost:
    return AgentLost(at=time.time(), host=name, why="it said nothing", silent_s=10.0)


def test_a_host_that_the_leader_has_given_up_leaves_at_once(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    here(run_dir, "host-0", "host-1", "host-2")
    append(run_dir, lost("host-1"))
    queue = Queue()
    with led(run_dir):
        assert asked(run_dir, queue) == 0
    assert queue.requeued == []
    assert "has given host-1 up" in caplog.messages[-1]


@pytest.mark.parametrize("lives", [True, False])
def test_a_leader_whose_last_line_gave_the_only_other_host_up_may_be_gone(
    run_dir: RunDir, lives: bool
) -> None:
    """With its host, the lock of which a file server keeps for a while; or alone."""
    here(run_dir, "host-0", "host-1")
    append(run_dir, lost("host-1"))
    queue = Queue()
    with led(run_dir) if lives else nullcontext():
        assert asked(run_dir, queue) == GIVEN_UP_S
    assert queue.requeued == [("host-0",)]


def gone_on() -> HostUnavailable:
    return HostUnavailable(at=time.time(), host="host-1", why="Slurm does not answer it")


def test_one_that_wrote_more_since_and_lives_is_not(run_dir: RunDir) -> None:
    here(run_dir, "host-0", "host-1")
    append(run_dir, lost("host-1"), gone_on())
    queue = Queue()
    with led(run_dir):
        assert asked(run_dir, queue) == 0
    assert queue.requeued == []


@pytest.mark.parametrize("others", [(), ("host-2",)])
def test_one_that_wrote_more_and_died_of_it_leaves_the_job_to_the_host_that_it_gave_up(
    run_dir: RunDir, others: tuple[str, ...]
) -> None:
    """Nor is it known whether the others are there still."""
    here(run_dir, "host-0", "host-1", *others)
    append(run_dir, lost("host-1"), gone_on())
    queue = Queue()
    assert asked(run_dir, queue) == GIVEN_UP_S
    assert queue.requeued == [("host-0",)]


def test_a_file_system_that_knows_no_locks_leaves_the_lines_to_tell(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    here(run_dir, "host-0", "host-1")
    append(run_dir, lost("host-1"), gone_on())
    queue = Queue()

    def refuses(fd: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    assert asked(run_dir, queue) == 0
    assert queue.requeued == []


@pytest.mark.parametrize("lines_after_s", [1.0, 60.0])
@pytest.mark.parametrize("lives", [True, False])
def test_a_leader_that_writes_lives_unless_it_has_died_since(
    run_dir: RunDir, lines_after_s: float, lives: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whenever that is seen: also after the scheduler was asked, and did not answer."""
    caplog.set_level(logging.INFO)
    here(run_dir, "host-0", "host-1", "host-2")
    stack = ExitStack()

    def writes() -> None:
        append(run_dir, lost("host-1"))
        if lives:
            stack.enter_context(led(run_dir))

    clock = Writing(writes, lines_after_s)
    queue = Queue(says=lambda before: SILENT if before < 40 else None)
    with stack:
        queue_again(run_dir, TERM, "host-1", lambda name: queue, clock)
    if lives:
        assert bool(queue.requeued) == (lines_after_s > LOOK_S)
        assert "host-1 was cut off from a leader that lives" in caplog.messages[-1]
    else:
        assert len(queue.requeued) == 41
        assert "queued again, without host-0" in caplog.messages[-1]


def test_one_that_writes_and_never_gives_this_host_up_is_cut_off_itself(run_dir: RunDir) -> None:
    """It blames no host before it hears another one, or the scheduler; its ranks grow silent."""
    here(run_dir, "host-0", "host-1")
    silent = HealthChanged(at=time.time(), attempt=0, ranks=((0, 0),), health="silent", age_s=10.0)
    stack, queue = ExitStack(), Queue()

    def writes() -> None:
        append(run_dir, silent)
        stack.enter_context(led(run_dir))

    clock = Writing(writes, 1.0)
    begun = clock.time
    with stack:
        queue_again(run_dir, TERM, "host-1", lambda name: queue, clock)
    assert queue.requeued == [("host-0",)]
    assert clock.time - begun == GIVEN_UP_S


@dataclass
class Writing(TurnedClock):
    """While time passes, a leader writes."""

    write: Callable[[], None] = lambda: None
    due_s: float = 0.0

    def __init__(self, write: Callable[[], None], after_s: float) -> None:
        super().__init__()
        self.write, self.due_s = write, self.time + after_s

    def sleep(self, seconds: float) -> None:
        before = self.time
        super().sleep(seconds)
        if before < self.due_s <= self.time:
            self.write()


def test_where_the_leader_is_dead_the_journal_is_silent_and_the_job_queued_again_soon(
    run_dir: RunDir,
) -> None:
    """As on Slurm when the leader's node dies: its last lines were of training."""
    here(run_dir, "host-0", "host-1", "host-2")
    queue = Queue()
    assert asked(run_dir, queue) == LOOK_S
    assert queue.requeued == [("host-0",)]


# A host that no leader ever heard


@pytest.mark.parametrize("writes_after_s", [1.0, 1e9])
def test_a_host_that_a_leader_which_lives_never_heard_ends_nobodys_run(
    run_dir: RunDir, writes_after_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """The others train with a spare; of a healthy job a leader may write nothing for long."""
    caplog.set_level(logging.INFO)
    here(run_dir, "host-0", "host-2")
    queue = Queue()
    with ExitStack() as leading:
        goes_on = partial(writes_on, run_dir, leading, gone_on())
        waited_s = stranger_asks(run_dir, queue, Writing(goes_on, writes_after_s), leading)
    assert queue.requeued == []
    assert STRANGER_S <= waited_s <= STRANGER_S + 10
    assert "host-1 was never heard by the leader on host-0, which lives" in caplog.messages[-1]


def test_it_asks_once_the_lock_of_a_leader_that_died_is_free(run_dir: RunDir) -> None:
    """A file server keeps that of a dead host for its lease."""
    queue = Queue()
    with ExitStack() as leading:
        waited_s = stranger_asks(run_dir, queue, Writing(leading.close, 90.0), leading)
    assert queue.requeued == [("host-0",)]
    assert 90.0 <= waited_s < STRANGER_S


def test_it_waits_no_longer_than_for_the_end_of_the_job(run_dir: RunDir) -> None:
    queue = Queue()
    with ExitStack() as leading:
        ends = partial(writes_on, run_dir, leading, CancelRequested(at=time.time(), by="me"))
        waited_s = stranger_asks(run_dir, queue, Writing(ends, 20.0), leading)
    assert queue.requeued == []
    assert waited_s < STRANGER_S / 2


def test_where_no_leader_began_in_this_run_nobody_is_a_stranger(run_dir: RunDir) -> None:
    """Who holds the journal may hang on the way to its first line."""
    queue = Queue()
    with led(run_dir):
        asked(run_dir, queue, Term(LAUNCH, restarts=1))
    assert queue.requeued == [("host-0",)]


def stranger_asks(run_dir: RunDir, queue: Queue, clock: "Writing", leading: ExitStack) -> float:
    leading.enter_context(led(run_dir))
    begun = clock.time
    queue_again(run_dir, TERM, "host-1", lambda name: queue, clock)
    return clock.time - begun


def writes_on(run_dir: RunDir, leading: ExitStack, event: Event) -> None:
    """The leader lives on, and writes."""
    leading.close()
    append(run_dir, event)
    leading.enter_context(led(run_dir))
