"""What the leader's monitor tells: figures of hosts and ranks, and that a program runs."""

from orchestrator.contract.messages.agent_protocol import Digest, MemoryUse, RankDigest
from orchestrator.contract.messages.events import HangDetected, ProgramRuns
from orchestrator.contract.spec.run_spec import RunSpec
from orchestrator.leader.monitor import Monitor
from tests.job.job_driver import Job


def test_checkpoints_in_memory_are_known_by_host_until_the_next_attempt() -> None:
    run = Job(in_memory=True).running().run
    assert run.job is not None
    monitor = Monitor(run.job)
    monitor.begin(1, run, now=0.0)
    for host, held, age in (("a", 2, 5.0), ("b", 0, None), ("a", 3, 1.0)):
        use = MemoryUse(host=host, num_bytes=100, held=held, copied_s=age)
        list(monitor.hear(Digest(attempt=1, ranks=(), memory=use), now=1.0))
    late = MemoryUse(host="c", num_bytes=1, held=0, copied_s=None)
    list(monitor.hear(Digest(attempt=0, ranks=(), memory=late), now=1.0))
    figures = monitor.rank_figures(now=1.0)
    assert figures["memory_bytes"] == [100.0, 100.0]
    assert sorted(figures["memory_held"]) == [0.0, 3.0]
    assert figures["memory_copy_age"] == [1.0]
    monitor.begin(2, run, now=2.0)
    assert monitor.rank_figures(now=2.0)["memory_bytes"] == []


def a_digest(rank: int, step: int = 0, *, ended: bool = False) -> Digest:
    digest = RankDigest(
        rank=rank,
        pid=100 + rank,
        step=step,
        phase="train" if step else "init",
        age_s=0.0,
        still_s=0.0,
        loss=None,
        tokens_per_second=None,
        ended=ended,
    )
    return Digest(attempt=1, ranks=(digest,))


def watched(job: Job) -> Monitor:
    assert job.run.job is not None
    monitor = Monitor(job.run.job)
    monitor.begin(1, job.run, now=0.0)
    return monitor


def looks(monitor: Monitor, until: int) -> list[object]:
    return [event for now in range(until + 1) for event in monitor.look(lambda: True, float(now))]


OWN = RunSpec(script="train.py")


def test_a_program_without_steps_runs_once_all_its_ranks_have_lived_for_a_while() -> None:
    monitor = watched(Job(run=OWN).starts())
    for rank in range(3):
        list(monitor.hear(a_digest(rank), now=0.0))
    assert looks(monitor, 30) == []  # rank 3 has not started
    list(monitor.hear(a_digest(3), now=30.0))
    told = [(now, one) for now in range(30, 60) for one in monitor.look(lambda: True, now)]
    assert told == [(40, ProgramRuns(attempt=1))]


def test_a_program_with_a_step_or_with_an_ended_rank_is_not_told_to_run() -> None:
    for last in (a_digest(3, step=1), a_digest(3, ended=True)):
        monitor = watched(Job(run=OWN).starts())
        for rank in range(3):
            list(monitor.hear(a_digest(rank), now=0.0))
        list(monitor.hear(last, now=0.0))
        assert looks(monitor, 60) == []


def test_the_bundled_trainer_runs_with_its_first_step() -> None:
    monitor = watched(Job().starts())
    for rank in range(4):
        list(monitor.hear(a_digest(rank), now=0.0))
    assert looks(monitor, 60) == []


def test_a_program_that_runs_without_steps_hangs_after_the_limit_of_a_start() -> None:
    monitor = watched(Job(run=OWN).starts())
    for rank in range(4):
        list(monitor.hear(a_digest(rank), now=0.0))
    init = monitor.limits.init
    seconds = range(int(init) + 20)
    kinds = {type(one): now for now in seconds for one in monitor.look(lambda: True, now)}
    assert kinds[HangDetected] == int(init) + 1
    assert kinds[ProgramRuns] == 10
