"""Agents whose leader is lost: one takes over, others follow or exit. The scheduler may answer
late, refuse the requeue, or have ended the job."""

import asyncio
import errno
import fcntl
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest
from msgspec.structs import replace

from ndctl.rank.fence import GivenUp
from orchestrator.contract.files.fence import Fence, check_leader, read_fence, write_fence
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
from orchestrator.failover.after_leader import UNLED, VERDICT_S, TakeOver
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
NO_ANSWER = Unanswered("Slurm does not answer `scontrol show job`: Socket timed out")
REFUSAL = BackendError("Slurm refuses `scontrol requeue 1`: Requested operation is disabled")


DEAD = CurrentRun(
    phase="running",
    words="Slurm job 7 is RUNNING",
    hosts=("host-0", "host-1"),
    given_up=dict.fromkeys(("host-0", "host-2"), "Slurm says that it is DOWN"),
)
"""The node of the leader is lost, and there is no spare."""


@dataclass
class FakeQueue(FakeBackend):
    """A scheduler that answers a requeue request with `answer(number of earlier requests)`."""

    own: CurrentRun = DEAD

    answer: Callable[[int], BackendError | None] = lambda before: None
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
        error = self.answer(len(self.requeued))
        self.requeued.append(tuple(exclude))
        if error is not None:
            raise error


class OneMachine(FakeBackend):
    """No scheduler granted the hosts."""

    @property
    def granted(self) -> None:  # type: ignore[override]
        return None


HEALTHY = "its process on host-0 had ended, and host-0 is well"


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path)
    run_dir.logs.mkdir()
    write_fence(run_dir.fence, Fence(leader="the old leader", attempt=1))
    append(run_dir, a_job(tmp_path), leader_started("host-0"))
    return run_dir


def leader_started(host: str, restarts: int = 0) -> LeaderStarted:
    granted = Allocation(id="7", restarts=restarts, hosts=("host-0", "host-1"))
    return LeaderStarted(at=time.time(), host=host, pid=1, allocation=granted)


def append(run_dir: RunDir, *happened: Event) -> None:
    with Journal(run_dir.journal, SystemClock()) as journal:
        supervisor = Supervisor(journal)
        for event in happened:
            supervisor.feed(event)


def exit_after(run_dir: RunDir, queue: FakeQueue, term: Term = TERM) -> float:
    """Seconds until the agent of host-1 exits."""
    clock = TurnedClock()
    start = clock.time
    assert settle_lost_leader(run_dir, queue, clock, term) == "leave"
    return clock.time - start


def settle_lost_leader(
    run_dir: RunDir,
    backend: FakeBackend,
    clock: TurnedClock,
    term: Term = TERM,
    is_alone: Callable[[], bool] = lambda: True,
    *,
    heard: bool = True,
) -> Outcome:
    """The outcome for the agent of host-1."""

    async def pause(seconds: float) -> None:
        clock.sleep(seconds)

    storage = FailoverFiles(run_dir, clock)
    leaderless = Leaderless(
        storage, term, "host-1", lambda name: backend, clock, is_alone, heard, pause=pause
    )
    return asyncio.run(leaderless.settle())


@pytest.fixture
def local_run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path)
    run_dir.logs.mkdir()
    append(run_dir, a_job(tmp_path), LeaderStarted(at=time.time(), host="host-0", pid=1))
    return run_dir


def test_without_a_scheduler_an_agent_takes_over_when_its_leader_has_ended(
    local_run_dir: RunDir,
) -> None:
    backend, clock = OneMachine(), TurnedClock()
    outcome = settle_lost_leader(local_run_dir, backend, clock)
    assert isinstance(outcome, Claim)
    with outcome.journal, closing(outcome.turn):
        assert outcome.lost == TakeOver(HEALTHY, host_works=True)
        assert backend.cleared == ["host-0"]
    assert (fence := read_fence(local_run_dir.fence)) is not None
    assert fence.leader == outcome.name


def test_without_a_scheduler_agents_exit_if_no_leader_ever_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.logs.mkdir()
    append(run_dir, a_job(tmp_path))
    assert settle_lost_leader(run_dir, OneMachine(), TurnedClock()) == "leave"
    assert "no scheduler can start the job again" in caplog.text


def test_without_a_scheduler_agents_exit_if_the_leader_cannot_be_ended(
    local_run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    backend, clock = OneMachine(), TurnedClock()
    backend.uncleared = BackendError("agent process 7 of this job does not exit")
    start = clock.time
    assert settle_lost_leader(local_run_dir, backend, clock) == "leave"
    assert clock.time - start >= VERDICT_S
    assert "agent process 7 of this job does not exit" in caplog.text
    assert "ndctl submit SPEC --resume" in caplog.text


def test_a_requeue_is_requested_for_hours_if_the_scheduler_does_not_answer(run_dir: RunDir) -> None:
    queue = FakeQueue(answer=lambda before: NO_ANSWER if before < 800 else None)
    assert exit_after(run_dir, queue) > 3600
    assert queue.requeued == [("host-0",)] * 801


def test_a_refused_requeue_is_requested_again(run_dir: RunDir) -> None:
    queue = FakeQueue(answer=lambda before: REFUSAL if before < 3 else None)
    exit_after(run_dir, queue)
    assert len(queue.requeued) == 4


def test_an_agent_exits_with_commands_to_type_if_the_scheduler_keeps_refusing(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    queue = FakeQueue(answer=lambda before: NO_ANSWER if before == 1 else REFUSAL)
    assert REFUSED_S <= exit_after(run_dir, queue) < REFUSED_S + 60 + LOOK_S
    last = caplog.messages[-1]
    assert "`ndctl cancel job`" in last
    assert "--resume" in last
    assert "Requested operation is disabled" in last
    assert len(caplog.messages) == len(queue.requeued), "each answer is logged"


def test_an_agent_exits_if_the_scheduler_has_ended_the_job(run_dir: RunDir) -> None:
    queue = FakeQueue(answer=lambda before: Ended("Slurm job 1 has ended"))
    assert exit_after(run_dir, queue) == 0.0, (
        "the process that held the journal has ended, so no wait"
    )
    assert len(queue.requeued) == 1


def test_a_fence_that_cannot_be_read_is_read_again(run_dir: RunDir) -> None:
    class Disk(TurnedClock):
        """The fence becomes readable during the first wait."""

        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if run_dir.fence.is_dir():
                run_dir.fence.rmdir()
                write_fence(run_dir.fence, Fence(leader="the old leader", attempt=1))

    run_dir.fence.unlink()
    run_dir.fence.mkdir()
    queue = FakeQueue()
    settle_lost_leader(run_dir, queue, Disk())
    assert queue.requeued == [("host-0",)]


def cancelled_by_a_person(run_dir: RunDir) -> None:
    append(run_dir, CancelRequested(at=time.time(), by="me"))


def leader_in_the_next_allocation(run_dir: RunDir) -> None:
    append(run_dir, leader_started("host-2", restarts=1))


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


@pytest.mark.parametrize(
    "happens", [cancelled_by_a_person, leader_in_the_next_allocation, submitted_again]
)
def test_an_agent_exits_if_the_job_continues_elsewhere_or_has_ended(
    run_dir: RunDir, happens: Callable[[RunDir], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    queue = FakeQueue(answer=lambda before: NO_ANSWER)
    queue.before_each = lambda: happens(run_dir)
    exit_after(run_dir, queue)
    assert len(queue.requeued) == 1
    assert caplog.messages[-1].startswith("leaving: ")


def test_agents_request_a_requeue_one_after_the_other(run_dir: RunDir) -> None:
    queue = FakeQueue()
    queue.before_each = lambda: _assert_held(run_dir)
    with run_dir.requeue_lock.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        # The other agent died, and its file server keeps the lock: this agent continues without it.
        assert exit_after(run_dir, queue) >= TURN_S
    exit_after(run_dir, queue)
    assert len(queue.requeued) == 2
    assert is_free(run_dir.requeue_lock)


def _assert_held(run_dir: RunDir) -> None:
    assert not is_free(run_dir.requeue_lock)


def test_waiting_agents_do_not_read_an_unchanged_journal(run_dir: RunDir) -> None:
    """Thousands of agents wait, and it may have hundreds of megabytes. All use one result."""
    queue, term = FakeQueue(), Term(LAUNCH, UNLED)
    exit_after(run_dir, queue, term)
    mark = run_dir.requeue_lock.read_text()
    assert mark, "three allocations had no leader, so the result is final"
    run_dir.requeue_lock.write_text("")
    run_dir.journal.write_text("nobody can read this\n")
    with run_dir.requeue_lock.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def write_mark() -> None:
            other.write(mark)
            other.flush()

        clock = ClockWithWriter(write_mark, 100.0)
        start = clock.time
        settle_lost_leader(run_dir, queue, clock, term)
    assert 100.0 <= clock.time - start < TURN_S
    assert queue.requeued == []


def test_a_waiting_agent_reads_the_journal_if_a_leader_writes(run_dir: RunDir) -> None:
    """In this case perhaps only this host was cut off."""
    agents_registered(run_dir, "host-0", "host-1", "host-2")
    stack, queue = ExitStack(), FakeQueue()

    def writes() -> None:
        append(run_dir, agent_lost("host-1"), host_unavailable())
        stack.enter_context(leader_alive(run_dir))

    clock = ClockWithWriter(writes, 100.0)
    start = clock.time
    with stack, run_dir.requeue_lock.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        settle_lost_leader(run_dir, queue, clock, TERM)
    assert 100.0 <= clock.time - start < TURN_S
    assert queue.requeued == []


def test_a_later_look_reads_only_new_lines(run_dir: RunDir) -> None:
    agents_registered(run_dir, "host-0", "host-1")
    following = Following(run_dir, "host-1")
    before = following.look()
    append(run_dir, agent_lost("host-1"), host_unavailable())
    data = run_dir.journal.read_bytes()
    lines = data.splitlines(keepends=True)
    garbled = [b"#" * (len(line) - 1) + b"\n" for line in lines[: before.lines]]
    run_dir.journal.write_bytes(b"".join([*garbled, *lines[before.lines :]]))
    now = following.look()
    assert (before.given_up, now.given_up) == (False, True)
    assert now.lines == len(lines)
    run_dir.journal.write_bytes(b"".join(lines[: before.lines]))
    assert following.look() == before, "a journal of another run (--new) is read from its start"


def test_the_first_look_starts_from_the_snapshot_of_the_leader(run_dir: RunDir) -> None:
    agents_registered(run_dir, "host-0", "host-1")
    append(run_dir, agent_lost("host-1"))
    whole = Following(run_dir, "host-1").look()
    with Journal(run_dir.journal, SystemClock()) as journal:
        snapshot.write(run_dir, Supervisor(journal).folded, lambda: None)
    lines = run_dir.journal.read_bytes().splitlines(keepends=True)
    garbled = b"".join(b"#" * (len(line) - 1) + b"\n" for line in lines[:-1])
    seen = run_dir.state.read_bytes()
    assert Following(run_dir, "host-1").look() == whole, "the same result with the snapshot"
    run_dir.journal.write_bytes(garbled + lines[-1])
    head, _, rest = seen.partition(b"\n")
    before = sha256((garbled + lines[-1])[-snapshot.BEFORE :]).hexdigest()
    run_dir.state.write_bytes(
        json.dumps(json.loads(head) | {"before": before}).encode() + b"\n" + rest
    )
    assert Following(run_dir, "host-1").look() == whole, "no line before the snapshot is read"


# No leader starts


@pytest.mark.parametrize("granted", [("host-2", "host-1"), ("host-1", "host-2")])
def test_if_no_leader_started_the_host_of_the_previous_leader_is_not_excluded(
    run_dir: RunDir, granted: tuple[str, ...]
) -> None:
    """The first granted host is excluded instead, unless it is the host that asks."""
    queue = FakeQueue(own=replace(RUNS, hosts=granted))
    exit_after(run_dir, queue, Term(LAUNCH, restarts=1))
    assert queue.requeued == [tuple(host for host in granted[:1] if host != "host-1")]


def test_after_some_allocations_without_a_leader_the_job_is_not_queued_again(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    queue = FakeQueue(own=replace(RUNS, hosts=("host-0", "host-1")))
    for restarts in range(1, UNLED):
        exit_after(run_dir, queue, Term(LAUNCH, restarts))
    assert len(queue.requeued) == UNLED - 1
    exit_after(run_dir, queue, Term(LAUNCH, UNLED))
    assert len(queue.requeued) == UNLED - 1
    assert f"no leader has started in {UNLED} allocations in a row" in caplog.messages[-1]
    write_fence(run_dir.fence, Fence(leader="a late leader", attempt=1))
    append(run_dir, leader_started("host-0", UNLED))
    exit_after(run_dir, FakeQueue(), Term(LAUNCH, UNLED))


# A host that was cut off from a leader that is alive, or died later


@contextmanager
def leader_alive(run_dir: RunDir) -> Iterator[None]:
    """A leader is alive: it locks the journal, and the kernel would release that at its death."""
    with run_dir.journal.open("a") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        yield


def agents_registered(run_dir: RunDir, *hosts: str) -> None:
    for name in hosts:
        registered = AgentRegistered(
            at=time.time(), host=name, address="::1", devices=1, pid=1, incarnation=name
        )
        append(run_dir, registered)


def agent_lost(name: str) -> AgentLost:
    return AgentLost(at=time.time(), host=name, why="it said nothing", silent_s=10.0)


def test_an_agent_that_the_leader_declared_lost_exits_at_once(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    agents_registered(run_dir, "host-0", "host-1", "host-2")
    append(run_dir, agent_lost("host-1"))
    queue = FakeQueue()
    with leader_alive(run_dir):
        assert exit_after(run_dir, queue) == 0
    assert queue.requeued == []
    assert "has given up host-1" in caplog.messages[-1]


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_leader_whose_last_line_gives_up_the_only_other_host_may_be_dead(
    run_dir: RunDir, is_alive: bool
) -> None:
    """It died with its host, and a file server keeps the lock for a while; or it died alone."""
    agents_registered(run_dir, "host-0", "host-1")
    append(run_dir, agent_lost("host-1"))
    queue = FakeQueue()
    with leader_alive(run_dir) if is_alive else nullcontext():
        assert exit_after(run_dir, queue) == (GIVEN_UP_S if is_alive else 0.0)
    assert queue.requeued == [("host-0",)]


def host_unavailable(host: str = "host-1") -> HostUnavailable:
    return HostUnavailable(at=time.time(), host=host, why="Slurm does not answer it")


def test_a_leader_that_wrote_more_lines_and_holds_the_lock_is_alive(run_dir: RunDir) -> None:
    agents_registered(run_dir, "host-0", "host-1")
    append(run_dir, agent_lost("host-1"), host_unavailable())
    queue = FakeQueue()
    with leader_alive(run_dir):
        assert exit_after(run_dir, queue) == 0
    assert queue.requeued == []


@pytest.mark.parametrize("others", [(), ("host-2",)])
def test_if_a_leader_that_wrote_more_lines_is_dead_the_given_up_host_requeues_the_job(
    run_dir: RunDir, others: tuple[str, ...]
) -> None:
    """It is not known whether the other hosts are alive."""
    agents_registered(run_dir, "host-0", "host-1", *others)
    append(run_dir, agent_lost("host-1"), host_unavailable())
    queue = FakeQueue()
    assert exit_after(run_dir, queue) == 0.0
    assert queue.requeued == [("host-0",)]


def test_without_file_locks_the_lines_of_the_journal_decide(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents_registered(run_dir, "host-0", "host-1")
    append(run_dir, agent_lost("host-1"), host_unavailable())
    queue = FakeQueue()

    def refuses(fd: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    assert exit_after(run_dir, queue) == 0
    assert queue.requeued == []


@pytest.mark.parametrize("lines_after_s", [1.0, 60.0])
@pytest.mark.parametrize("is_alive", [True, False])
def test_a_leader_that_writes_is_alive_unless_its_lock_is_free(
    run_dir: RunDir, lines_after_s: float, is_alive: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The lines may arrive at any time, even after a requeue request without an answer."""
    caplog.set_level(logging.INFO)
    agents_registered(run_dir, "host-0", "host-1", "host-2")
    queue = FakeQueue(answer=lambda before: NO_ANSWER if before < 40 else None)
    with ExitStack() as leading:
        leading.enter_context(leader_alive(run_dir))

        def writes() -> None:
            leader_writes(run_dir, leading, agent_lost("host-1"))
            if not is_alive:
                leading.close()

        assert settle_lost_leader(run_dir, queue, ClockWithWriter(writes, lines_after_s)) == "leave"
    if is_alive:
        assert bool(queue.requeued) == (lines_after_s > LOOK_S)
        assert "host-1 was cut off from the leader, which is alive" in caplog.messages[-1]
    else:
        assert len(queue.requeued) == 41
        assert "queued again, without host-0" in caplog.messages[-1]


def test_a_leader_that_writes_but_never_gives_up_this_host_is_cut_off_itself(
    run_dir: RunDir,
) -> None:
    """A cut-off leader declares no agent lost; it only reports that ranks are silent."""
    agents_registered(run_dir, "host-0", "host-1")
    silent = HealthChanged(at=time.time(), attempt=0, ranks=((0, 0),), health="silent", age_s=10.0)
    queue = FakeQueue()
    with ExitStack() as leading:
        leading.enter_context(leader_alive(run_dir))
        clock = ClockWithWriter(lambda: leader_writes(run_dir, leading, silent), 1.0)
        start = clock.time
        settle_lost_leader(run_dir, queue, clock)
    assert queue.requeued == [("host-0",)]
    assert clock.time - start == LOOK_S + GIVEN_UP_S, "from the first line that was seen"


@pytest.mark.parametrize("gives_up", [True, False])
def test_a_leader_that_took_over_has_time_to_give_up_a_host_that_it_never_heard(
    run_dir: RunDir, gives_up: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """This host cannot reach it, and lost the former leader earlier than the new one started."""
    caplog.set_level(logging.INFO)
    agents_registered(run_dir, "host-0", "host-1", "host-2")
    append(run_dir, leader_started("host-2"))
    queue = FakeQueue()
    with ExitStack() as leading:
        write = partial(leader_writes, run_dir, leading, agent_lost("host-1"))
        clock = ClockWithWriter(write, GIVEN_UP_S - 5.0 if gives_up else 1e9)
        waited_s = exit_after_clock(run_dir, queue, clock, leading)
    if gives_up:
        assert "was cut off from the leader, which is alive" in caplog.messages[-1]
    assert waited_s == GIVEN_UP_S, "the agents of this job are given up after less"
    assert queue.requeued == ([] if gives_up else [("host-2",)])


def test_a_leader_has_time_to_give_up_a_host_that_it_heard_but_that_never_heard_it(
    run_dir: RunDir,
) -> None:
    """The leader heard it late, because the network delayed the messages."""
    agents_registered(run_dir, "host-0", "host-1", "host-2")
    append(run_dir, leader_started("host-2"))
    agents_registered(run_dir, "host-1")
    queue = FakeQueue()
    with ExitStack() as leading:
        write = partial(leader_writes, run_dir, leading, agent_lost("host-1"))
        clock = ClockWithWriter(write, LOOK_S + 3.0)
        leading.enter_context(leader_alive(run_dir))
        assert settle_lost_leader(run_dir, queue, clock, heard=False) == "leave"
    assert queue.requeued == []


@dataclass
class ClockWithWriter(TurnedClock):
    """A clock that calls `write` once, when `after_s` seconds have passed."""

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


@pytest.mark.parametrize("lock_kept", [True, False])
def test_if_the_leader_is_dead_the_job_is_queued_again_soon(
    run_dir: RunDir, lock_kept: bool
) -> None:
    """As on Slurm after a failure of the leader's node, during training. A file server keeps the
    lock of the leader for a while; the kernel of a node that is up does not."""
    agents_registered(run_dir, "host-0", "host-1", "host-2")
    queue = FakeQueue()
    with leader_alive(run_dir) if lock_kept else nullcontext():
        assert exit_after(run_dir, queue) == (LOOK_S if lock_kept else 0.0)
    assert queue.requeued == [("host-0",)]


# A host that never registered with a leader


@pytest.mark.parametrize("writes_after_s", [1.0, 1e9])
def test_a_host_that_never_registered_does_not_end_the_allocation_of_a_live_leader(
    run_dir: RunDir, writes_after_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """The others train with a spare, and the leader of a healthy job may write nothing for long."""
    caplog.set_level(logging.INFO)
    agents_registered(run_dir, "host-0", "host-2")
    queue = FakeQueue()
    with ExitStack() as leading:
        write = partial(leader_writes, run_dir, leading, host_unavailable("host-2"))
        waited_s = exit_after_clock(run_dir, queue, ClockWithWriter(write, writes_after_s), leading)
    assert queue.requeued == []
    assert STRANGER_S <= waited_s <= STRANGER_S + 10
    assert "host-1 was never heard by the leader on host-0, which is alive" in caplog.messages[-1]


def test_a_host_that_never_registered_requeues_the_job_when_the_lock_is_free(
    run_dir: RunDir,
) -> None:
    """A file server keeps the lock of a dead host until its lease ends."""
    queue = FakeQueue()
    with ExitStack() as leading:
        waited_s = exit_after_clock(run_dir, queue, ClockWithWriter(leading.close, 90.0), leading)
    assert queue.requeued == [("host-0",)]
    assert 90.0 <= waited_s < STRANGER_S


def test_a_host_that_never_registered_exits_at_the_end_of_the_job(run_dir: RunDir) -> None:
    queue = FakeQueue()
    with ExitStack() as leading:
        end_job = partial(leader_writes, run_dir, leading, CancelRequested(at=time.time(), by="me"))
        waited_s = exit_after_clock(run_dir, queue, ClockWithWriter(end_job, 20.0), leading)
    assert queue.requeued == []
    assert waited_s < STRANGER_S / 2


def test_without_a_leader_in_this_allocation_no_host_counts_as_never_registered(
    run_dir: RunDir,
) -> None:
    """The process that holds the journal may hang before it writes its first line."""
    queue = FakeQueue()
    with leader_alive(run_dir):
        exit_after(run_dir, queue, Term(LAUNCH, restarts=1))
    assert queue.requeued == [("host-0",)]


def exit_after_clock(
    run_dir: RunDir, queue: FakeQueue, clock: "ClockWithWriter", leading: ExitStack
) -> float:
    leading.enter_context(leader_alive(run_dir))
    start = clock.time
    settle_lost_leader(run_dir, queue, clock, TERM)
    return clock.time - start


def leader_writes(run_dir: RunDir, leading: ExitStack, event: Event) -> None:
    """The leader is still alive and writes a line."""
    leading.close()
    append(run_dir, event)
    leading.enter_context(leader_alive(run_dir))


# One agent takes over


def take_over(run_dir: RunDir, backend: FakeBackend, clock: TurnedClock | None = None) -> Claim:
    """The claim of the agent of host-1; its locks are released."""
    outcome = settle_lost_leader(run_dir, backend, clock or TurnedClock())
    assert isinstance(outcome, Claim)
    outcome.turn.close()
    outcome.journal.__exit__(None, None, None)
    return outcome


def test_an_agent_takes_over_if_the_leaders_host_is_healthy(run_dir: RunDir) -> None:
    """All processes of the old leader have ended, and the fence would refuse its writes."""
    agents_registered(run_dir, "host-0", "host-1")
    backend = FakeBackend()
    claim = take_over(run_dir, backend)
    assert backend.cleared == ["host-0"]
    assert backend.requeued == []
    assert claim.lost == TakeOver(HEALTHY, host_works=True)
    assert read_fence(run_dir.fence) == Fence(leader=claim.name, attempt=1)
    with pytest.raises(GivenUp):
        check_leader(run_dir.fence, "the old leader")


def test_the_turn_and_the_journal_are_locked_until_the_new_leader_releases_them(
    run_dir: RunDir,
) -> None:
    agents_registered(run_dir, "host-0", "host-1")
    outcome = settle_lost_leader(run_dir, FakeBackend(), TurnedClock())
    assert isinstance(outcome, Claim)
    assert not is_free(run_dir.requeue_lock)
    assert has_writer(run_dir.journal)
    outcome.turn.close()
    outcome.journal.__exit__(None, None, None)
    assert is_free(run_dir.requeue_lock)


def test_no_agent_takes_over_while_the_leaders_host_is_cut_off_for_a_moment(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    """When the leader answers again, it stays the leader, and its processes are not ended."""
    agents_registered(run_dir, "host-0", "host-1")
    backend = FakeBackend(uncleared=BackendError("nothing could be started on host-0"))
    clock = TurnedClock()
    start = clock.time
    outcome = settle_lost_leader(run_dir, backend, clock, is_alone=lambda: clock.time - start < 25)
    assert outcome == "follow"
    assert 3 <= len(backend.cleared) <= 6
    assert backend.requeued == []
    assert read_fence(run_dir.fence) == Fence(leader="the old leader", attempt=1)
    assert "nothing could be started on host-0" in caplog.text


def test_the_job_is_requeued_if_the_leaders_host_never_answers(run_dir: RunDir) -> None:
    agents_registered(run_dir, "host-0", "host-1")
    backend = FakeBackend(uncleared=BackendError("nothing could be started on host-0"))
    clock = TurnedClock()
    start = clock.time
    assert settle_lost_leader(run_dir, backend, clock) == "leave"
    assert backend.requeued == [("host-0",)]
    assert VERDICT_S <= clock.time - start <= VERDICT_S + 2 * RETRY_S


def test_with_a_spare_an_agent_takes_over_at_once_if_the_leaders_host_does_not_answer(
    run_dir: RunDir,
) -> None:
    agents_registered(run_dir, "host-0", "host-1", "host-2")
    backend = FakeBackend(uncleared=BackendError("nothing could be started on host-0"))
    claim = take_over(run_dir, backend)
    assert "nothing could be started on host-0" in claim.lost.how
    assert not claim.lost.host_works


def test_the_second_agent_sees_the_changed_fence_and_follows(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    agents_registered(run_dir, "host-0", "host-1", "host-2")
    backend = FakeBackend()

    def change_fence() -> None:
        write_fence(run_dir.fence, Fence(leader="another agent", attempt=1))

    with run_dir.requeue_lock.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert settle_lost_leader(run_dir, backend, ClockWithWriter(change_fence, 20.0)) == "follow"
    assert (backend.cleared, backend.requeued) == ([], [])
    assert caplog.messages[-1] == "another agent takes over: waiting for it"


def test_an_agent_whose_leader_answers_again_follows_it(run_dir: RunDir) -> None:
    agents_registered(run_dir, "host-0", "host-1")
    with leader_alive(run_dir):
        assert (
            settle_lost_leader(run_dir, FakeBackend(), TurnedClock(), is_alone=lambda: False)
            == "follow"
        )


@dataclass
class SlowBackend(FakeBackend):
    """A scheduler that answers only after `meanwhile`."""

    meanwhile: Callable[[], None] = lambda: None

    def own_run(self, launch: LaunchPlan, hosts: Sequence[str]) -> CurrentRun:
        self.meanwhile()
        return super().own_run(launch, hosts)


def test_a_leader_that_is_back_when_the_scheduler_answers_at_last_is_not_ended(
    run_dir: RunDir,
) -> None:
    """It was suspended, for example."""
    agents_registered(run_dir, "host-0", "host-1", "host-2")
    heard: list[str] = []
    backend = SlowBackend(meanwhile=lambda: heard.append("the leader"))
    with leader_alive(run_dir):
        outcome = settle_lost_leader(run_dir, backend, TurnedClock(), is_alone=lambda: not heard)
    assert outcome == "follow"
    assert (backend.asked_own, backend.cleared, backend.requeued) == (1, [], [])


def test_the_job_is_requeued_if_an_unreachable_process_holds_the_journal(
    run_dir: RunDir,
) -> None:
    """For example, the leader is stopped on a host that is unreachable."""
    agents_registered(run_dir, "host-0", "host-1", "host-2")
    backend = FakeBackend(uncleared=BackendError("nothing could be started on host-0"))
    with leader_alive(run_dir):
        assert settle_lost_leader(run_dir, backend, TurnedClock()) == "leave"
    assert backend.requeued == [("host-0",)]
    fence = read_fence(run_dir.fence)
    assert fence is not None
    assert fence.leader != "the old leader", "if it continues, it cannot write"


def test_an_agent_waits_for_space_on_the_disk_before_it_takes_over(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    agents_registered(run_dir, "host-0", "host-1")
    clock = Emptied()
    began_at, backend = clock.monotonic(), FakeBackend()
    try:
        claim = take_over(run_dir, backend, clock)
    finally:
        clock.make_room()
    assert "the run directory cannot be written, so no leader can be judged" in caplog.text
    assert clock.monotonic() - began_at >= LOOK_S, "a live leader could write in this time"
    assert backend.cleared == ["host-0"]
    assert read_fence(run_dir.fence) == Fence(leader=claim.name, attempt=1)


def test_an_agent_exits_if_the_run_directory_is_gone(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    agents_registered(run_dir, "host-0", "host-1")

    def move_run_dir() -> None:
        run_dir.path.rename(run_dir.path.with_name("elsewhere"))

    class MovingBackend(FakeBackend):
        def clear_host(self, launch: LaunchPlan, host: str) -> str:
            move_run_dir()
            return super().clear_host(launch, host)

    assert settle_lost_leader(run_dir, MovingBackend(), TurnedClock()) == "leave"
    assert "the run directory is gone" in caplog.text


# Decisions of the lost leader stay valid


def requeue_decided(run_dir: RunDir) -> None:
    """The leader excludes host-1 and decides to requeue the job."""
    agents_registered(run_dir, "host-0", "host-1")
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
def test_a_requeue_that_the_leader_decided_is_not_repeated(
    run_dir: RunDir, phase: RunPhase, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent on a node without slurmd outlives the allocation, because Slurm cannot end it."""
    caplog.set_level(logging.INFO)
    requeue_decided(run_dir)
    queue = FakeQueue(own=CurrentRun(phase=phase, words="Slurm job 7 is PENDING (BeginTime)"))
    assert exit_after(run_dir, queue) == 0.0
    assert queue.requeued == []
    assert "Slurm job 7 is PENDING (BeginTime)" in caplog.messages[-1]


def test_an_allocation_that_fails_without_a_leader_is_queued_again(run_dir: RunDir) -> None:
    """For example, the batch script was killed together with the leader. No host is excluded."""
    agents_registered(run_dir, "host-0", "host-1")
    queue = FakeQueue(
        own=CurrentRun(phase="broken", words="Slurm job 7 is COMPLETING (JobLaunchFailure)")
    )
    assert exit_after(run_dir, queue) == 0.0
    assert queue.requeued == [()]


def test_a_decided_requeue_that_the_scheduler_did_not_get_is_requested_as_decided(
    run_dir: RunDir,
) -> None:
    """Without the host that the leader excluded, and with the leader's own host."""
    requeue_decided(run_dir)
    queue = FakeQueue(own=RUNS)
    assert exit_after(run_dir, queue) == 0.0
    assert queue.requeued == [("host-1",)]


@pytest.mark.parametrize(
    ("owner", "method"),
    [(FailoverFiles, "journal_size"), (Turn, "is_settled"), (FailoverFiles, "open_journal")],
)
def test_storage_that_fails_once_does_not_end_an_agent(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    """A file handle is stale for a moment; the call is repeated."""
    real, failed = getattr(owner, method), list[bool]()

    def fails_first(*args: object) -> object:
        if not failed:
            failed.append(True)
            raise OSError(errno.ESTALE, "stale file handle")
        return real(*args)

    monkeypatch.setattr(owner, method, fails_first)
    queue = FakeQueue(own=replace(DEAD, given_up={}))
    outcome = settle_lost_leader(run_dir, queue, TurnedClock())
    assert isinstance(outcome, Claim)
    outcome.turn.close()
    outcome.journal.__exit__(None, None, None)
    assert failed
