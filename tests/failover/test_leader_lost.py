"""Agents whose leader is gone: which takes over, which follow, which leave; and a scheduler that
answers late, refuses, or has ended the job."""

import asyncio
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
from msgspec.structs import replace

from orchestrator.contract.files.fence import Fence, GivenUp, check_leader, read_fence, write_fence
from orchestrator.contract.files.leader_file import Term
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import Allocation, LaunchPlan
from orchestrator.contract.messages.events import (
    AgentLost,
    AgentRegistered,
    CancelRequested,
    Event,
    HealthChanged,
    HostFlagged,
    HostStopped,
    HostUnavailable,
    LeaderStarted,
)
from orchestrator.errors import BackendError, Ended, Unanswered
from orchestrator.failover.after_leader import UNLED, VERDICT_S
from orchestrator.failover.ask_scheduler import REFUSED_S, RETRY_S
from orchestrator.failover.journal_watch import GIVEN_UP_S, LOOK_S, STRANGER_S, Following
from orchestrator.failover.leader_lost import Claim, Leaderless, Outcome
from orchestrator.failover.storage import FailoverFiles
from orchestrator.failover.turns import TURN_S, Turn
from orchestrator.job.stage import Queued
from orchestrator.journal import snapshot
from orchestrator.journal.journal import Journal, has_writer
from orchestrator.journal.supervisor import Supervisor
from orchestrator.posix.locks import is_free
from orchestrator.seams import CurrentRun, RunPhase
from orchestrator.system import SystemClock
from tests.agent.world import LAUNCH, RUNS, FakeBackend, TurnedClock, a_job
from tests.posix.test_retry_io import Emptied

TERM = Term(LAUNCH)
SILENT = Unanswered("Slurm does not answer `scontrol show job`: Socket timed out")
REFUSES = BackendError("Slurm refuses `scontrol requeue 1`: Requested operation is disabled")


DEAD = CurrentRun(
    phase="running",
    words="Slurm job 7 is RUNNING",
    hosts=("host-0", "host-1"),
    given_up=dict.fromkeys(("host-0", "host-2"), "Slurm says that it is DOWN"),
)
"""The leader's node is lost, and no spare is there."""


@dataclass
class Queue(FakeBackend):
    """A scheduler that says what it is told to before it takes the job back."""

    own: CurrentRun = DEAD

    says: Callable[[int], BackendError | None] = lambda before: None
    before_each: Callable[[], None] = field(default=lambda: None)

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
    """The seconds until it left."""
    clock = TurnedClock()
    begun = clock.time
    assert settled(run_dir, queue, clock, term) == "leave"
    return clock.time - begun


def settled(
    run_dir: RunDir,
    backend: FakeBackend,
    clock: TurnedClock,
    term: Term = TERM,
    is_alone: Callable[[], bool] = lambda: True,
) -> Outcome:
    """What becomes of the agent of host-1."""

    async def pause(seconds: float) -> None:
        clock.sleep(seconds)

    storage = FailoverFiles(run_dir, clock)
    leaderless = Leaderless(
        storage, term, "host-1", lambda name: backend, clock, is_alone, pause=pause
    )
    return asyncio.run(leaderless.settle())


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
    assert asked(run_dir, queue) == 0.0, "the process that held the journal has ended, so no wait"
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
    settled(run_dir, queue, Disk())
    assert queue.requeued == [("host-0",)]


def ended_by_a_person(run_dir: RunDir) -> None:
    append(run_dir, CancelRequested(at=time.time(), by="me"))


def led_in_the_next_run(run_dir: RunDir) -> None:
    append(run_dir, began("host-2", restarts=1))


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


@pytest.mark.parametrize("happens", [ended_by_a_person, led_in_the_next_run, submitted_again])
def test_a_job_that_is_not_ours_any_more_is_let_go(
    run_dir: RunDir, happens: Callable[[RunDir], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    queue = Queue(says=lambda before: SILENT)
    queue.before_each = lambda: happens(run_dir)
    asked(run_dir, queue)
    assert len(queue.requeued) == 1
    assert caplog.messages[-1].startswith("leaving: ")


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
        settled(run_dir, queue, clock, term)
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
        settled(run_dir, queue, clock, TERM)
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
    queue = Queue(own=replace(RUNS, hosts=granted))
    asked(run_dir, queue, Term(LAUNCH, restarts=1))
    assert queue.requeued == [tuple(host for host in granted[:1] if host != "host-1")]


def test_after_some_runs_in_which_none_began_the_job_is_not_queued_again(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    queue = Queue(own=replace(RUNS, hosts=("host-0", "host-1")))
    for restarts in range(1, UNLED):
        asked(run_dir, queue, Term(LAUNCH, restarts))
    assert len(queue.requeued) == UNLED - 1
    asked(run_dir, queue, Term(LAUNCH, UNLED))
    assert len(queue.requeued) == UNLED - 1
    assert f"no leader has started in {UNLED} allocations in a row" in caplog.messages[-1]
    write_fence(run_dir.fence, Fence(leader="a late one", attempt=1))
    append(run_dir, began("host-0", UNLED))
    asked(run_dir, Queue(), Term(LAUNCH, UNLED))


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
    assert "has given up host-1" in caplog.messages[-1]


@pytest.mark.parametrize("lives", [True, False])
def test_a_leader_whose_last_line_gave_the_only_other_host_up_may_be_gone(
    run_dir: RunDir, lives: bool
) -> None:
    """With its host, the lock of which a file server keeps for a while; or alone."""
    here(run_dir, "host-0", "host-1")
    append(run_dir, lost("host-1"))
    queue = Queue()
    with led(run_dir) if lives else nullcontext():
        assert asked(run_dir, queue) == (GIVEN_UP_S if lives else 0.0)
    assert queue.requeued == [("host-0",)]


def gone_on(host: str = "host-1") -> HostUnavailable:
    return HostUnavailable(at=time.time(), host=host, why="Slurm does not answer it")


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
    assert asked(run_dir, queue) == 0.0
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
    queue = Queue(says=lambda before: SILENT if before < 40 else None)
    with ExitStack() as leading:
        leading.enter_context(led(run_dir))

        def writes() -> None:
            writes_on(run_dir, leading, lost("host-1"))
            if not lives:
                leading.close()

        assert settled(run_dir, queue, Writing(writes, lines_after_s)) == "leave"
    if lives:
        assert bool(queue.requeued) == (lines_after_s > LOOK_S)
        assert "host-1 was cut off from the leader, which is alive" in caplog.messages[-1]
    else:
        assert len(queue.requeued) == 41
        assert "queued again, without host-0" in caplog.messages[-1]


def test_one_that_writes_and_never_gives_this_host_up_is_cut_off_itself(run_dir: RunDir) -> None:
    """It blames no host before it hears another one, or the scheduler; its ranks grow silent."""
    here(run_dir, "host-0", "host-1")
    silent = HealthChanged(at=time.time(), attempt=0, ranks=((0, 0),), health="silent", age_s=10.0)
    queue = Queue()
    with ExitStack() as leading:
        leading.enter_context(led(run_dir))
        clock = Writing(lambda: writes_on(run_dir, leading, silent), 1.0)
        begun = clock.time
        settled(run_dir, queue, clock)
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


@pytest.mark.parametrize("kept", [True, False])
def test_where_the_leader_is_dead_the_job_is_queued_again_soon(run_dir: RunDir, kept: bool) -> None:
    """As on Slurm when the leader's node dies: its last lines were of training. A file server keeps
    its lock for a while; the kernel of a node that lives does not."""
    here(run_dir, "host-0", "host-1", "host-2")
    queue = Queue()
    with led(run_dir) if kept else nullcontext():
        assert asked(run_dir, queue) == (LOOK_S if kept else 0.0)
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
        goes_on = partial(writes_on, run_dir, leading, gone_on("host-2"))
        waited_s = stranger_asks(run_dir, queue, Writing(goes_on, writes_after_s), leading)
    assert queue.requeued == []
    assert STRANGER_S <= waited_s <= STRANGER_S + 10
    assert "host-1 was never heard by the leader on host-0, which is alive" in caplog.messages[-1]


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
    settled(run_dir, queue, clock, TERM)
    return clock.time - begun


def writes_on(run_dir: RunDir, leading: ExitStack, event: Event) -> None:
    """The leader lives on, and writes."""
    leading.close()
    append(run_dir, event)
    leading.enter_context(led(run_dir))


# One of them takes over


def claimed(run_dir: RunDir, backend: FakeBackend, clock: TurnedClock | None = None) -> Claim:
    """What the agent of host-1 has; the lock of the journal and the turn are let go of."""
    found = settled(run_dir, backend, clock or TurnedClock())
    assert isinstance(found, Claim)
    found.turn.close()
    found.journal.__exit__(None, None, None)
    return found


def test_an_agent_takes_over_from_a_leader_whose_host_is_well(run_dir: RunDir) -> None:
    """Nothing of the former leader is left there by then, and it could write nothing any more."""
    here(run_dir, "host-0", "host-1")
    backend = FakeBackend()
    claim = claimed(run_dir, backend)
    assert backend.cleared == ["host-0"]
    assert backend.requeued == []
    assert claim.how == "its process on host-0 had ended, and host-0 is well"
    assert read_fence(run_dir.fence) == Fence(leader=claim.name, attempt=1)
    with pytest.raises(GivenUp):
        check_leader(run_dir.fence, "the former")


def test_the_turn_and_the_journal_are_kept_until_the_new_leader_lets_go(run_dir: RunDir) -> None:
    here(run_dir, "host-0", "host-1")
    found = settled(run_dir, FakeBackend(), TurnedClock())
    assert isinstance(found, Claim)
    assert not is_free(run_dir.requeue_lock)
    assert has_writer(run_dir.journal)
    found.turn.close()
    found.journal.__exit__(None, None, None)
    assert is_free(run_dir.requeue_lock)


def test_a_leaders_host_that_is_cut_off_for_a_moment_is_waited_for(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    """And once its leader is heard again nobody takes over, and it is not ended."""
    here(run_dir, "host-0", "host-1")
    backend = FakeBackend(uncleared=BackendError("nothing could be started on host-0"))
    clock = TurnedClock()
    begun = clock.time
    found = settled(run_dir, backend, clock, is_alone=lambda: clock.time - begun < 25)
    assert found == "follow"
    assert 3 <= len(backend.cleared) <= 6
    assert backend.requeued == []
    assert read_fence(run_dir.fence) == Fence(leader="the former", attempt=1)
    assert "nothing could be started on host-0" in caplog.text


def test_one_that_never_answers_is_given_up_in_the_end(run_dir: RunDir) -> None:
    here(run_dir, "host-0", "host-1")
    backend = FakeBackend(uncleared=BackendError("nothing could be started on host-0"))
    clock = TurnedClock()
    begun = clock.time
    assert settled(run_dir, backend, clock) == "leave"
    assert backend.requeued == [("host-0",)]
    assert VERDICT_S <= clock.time - begun <= VERDICT_S + 2 * RETRY_S


def test_with_a_spare_a_leaders_host_that_does_not_answer_is_not_waited_for(
    run_dir: RunDir,
) -> None:
    here(run_dir, "host-0", "host-1", "host-2")
    backend = FakeBackend(uncleared=BackendError("nothing could be started on host-0"))
    claim = claimed(run_dir, backend)
    assert "nothing could be started on host-0" in claim.how


def test_whoever_comes_second_finds_the_fence_changed_and_follows(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    here(run_dir, "host-0", "host-1", "host-2")
    backend = FakeBackend()

    def taken() -> None:
        write_fence(run_dir.fence, Fence(leader="another agent", attempt=1))

    with run_dir.requeue_lock.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert settled(run_dir, backend, Writing(taken, 20.0)) == "follow"
    assert (backend.cleared, backend.requeued) == ([], [])
    assert caplog.messages[-1] == "another agent takes over: waiting for it"


def test_one_whose_leader_is_heard_again_follows_it(run_dir: RunDir) -> None:
    here(run_dir, "host-0", "host-1")
    with led(run_dir):
        assert settled(run_dir, FakeBackend(), TurnedClock(), is_alone=lambda: False) == "follow"


def test_a_journal_that_is_kept_by_a_process_that_cannot_be_ended_has_the_job_queued_again(
    run_dir: RunDir,
) -> None:
    """As of a leader that is stopped on a host that nobody reaches."""
    here(run_dir, "host-0", "host-1", "host-2")
    backend = FakeBackend(uncleared=BackendError("nothing could be started on host-0"))
    with led(run_dir):
        assert settled(run_dir, backend, TurnedClock()) == "leave"
    assert backend.requeued == [("host-0",)]
    fence = read_fence(run_dir.fence)
    assert fence is not None
    assert fence.leader != "the former", "should it wake, it can write nothing"


def test_a_full_disk_is_waited_for_before_anything_is_claimed(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    here(run_dir, "host-0", "host-1")
    clock = Emptied()
    try:
        claim = claimed(run_dir, FakeBackend(), clock)
    finally:
        clock.make_room()
    assert "failed to take the fence, trying again" in caplog.text
    assert read_fence(run_dir.fence) == Fence(leader=claim.name, attempt=1)


def test_a_run_directory_that_is_gone_leaves_nothing_to_take_over(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    here(run_dir, "host-0", "host-1")

    def gone() -> None:
        run_dir.path.rename(run_dir.path.with_name("elsewhere"))

    class Moving(FakeBackend):
        def clear_host(self, launch: LaunchPlan, host: str) -> str:
            gone()
            return super().clear_host(launch, host)

    assert settled(run_dir, Moving(), TurnedClock()) == "leave"
    assert "the run directory is gone" in caplog.text


# What the leader had decided stands


def given_back(run_dir: RunDir) -> None:
    """The leader has host-1 stop, and the job queued again without it."""
    here(run_dir, "host-0", "host-1")
    append(
        run_dir,
        HostFlagged(at=time.time(), host="host-1", state="DOWN", reason="Not responding"),
        *(
            HostStopped(at=time.time(), attempt=1, host=host, finished=False)
            for host in ("host-0", "host-1")
        ),
    )
    with Journal(run_dir.journal, SystemClock()) as journal:
        run = Supervisor(journal).run
    assert isinstance(run.stage, Queued)
    assert run.scheduler.left_out == ("host-1",)


@pytest.mark.parametrize("phase", ["queued again", "ending", "over"])
def test_a_requeue_that_the_leader_decided_on_is_settled(
    run_dir: RunDir, phase: RunPhase, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent of a node whose slurmd is dead outlives the run: nobody can end it."""
    caplog.set_level(logging.INFO)
    given_back(run_dir)
    queue = Queue(own=CurrentRun(phase=phase, words="Slurm job 7 is PENDING (BeginTime)"))
    assert asked(run_dir, queue) == 0.0
    assert queue.requeued == []
    assert "Slurm job 7 is PENDING (BeginTime)" in caplog.messages[-1]


def test_a_run_that_breaks_while_nobody_leads_it_is_queued_again(run_dir: RunDir) -> None:
    """As one whose batch script was killed with the leader; no host is left out for that."""
    here(run_dir, "host-0", "host-1")
    queue = Queue(
        own=CurrentRun(phase="broken", words="Slurm job 7 is COMPLETING (JobLaunchFailure)")
    )
    assert asked(run_dir, queue) == 0.0
    assert queue.requeued == [()]


def test_one_that_died_before_the_scheduler_heard_of_it_is_asked_for_as_decided(
    run_dir: RunDir,
) -> None:
    """Without the host that the leader left out, and with the leader's own."""
    given_back(run_dir)
    queue = Queue(own=RUNS)
    assert asked(run_dir, queue) == 0.0
    assert queue.requeued == [("host-1",)]


@pytest.mark.parametrize(
    ("owner", "method"),
    [(FailoverFiles, "journal_size"), (Turn, "is_settled"), (FailoverFiles, "open_journal")],
)
def test_storage_that_fails_once_ends_no_agent_without_a_leader(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    """A file handle that is stale for a moment: the call is made again."""
    real, failed = getattr(owner, method), list[bool]()

    def fails_first(*args: object) -> object:
        if not failed:
            failed.append(True)
            raise OSError(errno.ESTALE, "stale file handle")
        return real(*args)

    monkeypatch.setattr(owner, method, fails_first)
    queue = Queue(own=replace(DEAD, given_up={}))
    outcome = settled(run_dir, queue, TurnedClock())
    assert isinstance(outcome, Claim)
    outcome.turn.close()
    outcome.journal.__exit__(None, None, None)
    assert failed
