"""Figures of hosts and ranks that the leader serves as metrics."""

from orchestrator.contract.messages.agent_protocol import Digest, MemoryUse
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
