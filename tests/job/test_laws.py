"""Laws of the supervisor under random faults: `LawChecker` checks them after each event."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.contract.messages.actions import EndJob
from orchestrator.contract.messages.events import CheckpointSaved, StepReached
from orchestrator.job.stage import Running, Starting
from orchestrator.job.transitions import fold
from tests.job.fake_cluster import Cluster
from tests.job.job_driver import exited

randoms = st.randoms(use_true_random=False)
budgets = st.integers(0, 4)


@settings(deadline=None, max_examples=80)
@given(randoms, st.integers(1, 3), st.integers(0, 2), budgets, st.integers(0, 80))
def test_under_random_failures_every_law_holds_and_every_job_ends(
    random: Random, hosts: int, spares: int, budget: int, turns: int
) -> None:
    cluster = Cluster(random, hosts, spares, max_restarts=budget)
    cluster.play(turns)
    entries = cluster.checker.entries
    assert sum(isinstance(a, EndJob) for entry in entries for a in entry.actions) == 1

    # A supervisor that replays the journal from any point reaches the same state.
    cut = random.randrange(len(entries) + 1)
    events = [entry.event for entry in entries]
    assert fold(events[cut:], fold(events[:cut])) == fold(events) == cluster.run


@settings(deadline=None, max_examples=80)
@given(randoms, st.integers(1, 4), st.integers(0, 2), budgets, st.integers(0, 80), st.booleans())
def test_under_random_scheduler_events_every_law_holds_and_every_job_ends(
    random: Random, hosts: int, spares: int, budget: int, turns: int, shrink: bool
) -> None:
    more = {"max_restarts": budget, "shrink": shrink, "preflight": bool(turns % 2)}
    cluster = Cluster(random, hosts, spares, scheduled=True, **more)
    cluster.play(turns)
    events = [entry.event for entry in cluster.checker.entries]
    cut = random.randrange(len(events) + 1)
    assert fold(events[cut:], fold(events[:cut])) == fold(events) == cluster.run


@settings(deadline=None, max_examples=80)
@given(randoms, st.integers(1, 4), st.integers(0, 2), budgets, st.integers(0, 80), st.booleans())
def test_if_the_scheduler_replaces_hosts_every_law_holds_and_every_job_ends(
    random: Random, hosts: int, spares: int, budget: int, turns: int, shrink: bool
) -> None:
    more = {"max_restarts": budget, "shrink": shrink, "preflight": bool(turns % 2)}
    cluster = Cluster(random, hosts, spares, scheduled=True, successor_s=300.0, **more)
    cluster.play(turns)
    events = [entry.event for entry in cluster.checker.entries]
    cut = random.randrange(len(events) + 1)
    assert fold(events[cut:], fold(events[:cut])) == fold(events) == cluster.run


@settings(deadline=None, max_examples=40)
@given(randoms, budgets, st.integers(0, 40))
def test_an_ended_job_may_be_resumed_and_ends_again(
    random: Random, budget: int, turns: int
) -> None:
    cluster = Cluster(random, 2, 1, max_restarts=budget)
    for _ in range(3):
        cluster.calm = False
        cluster.play(turns)
        last = cluster.run
        cluster.submits(resume=True)
        assert cluster.run.attempt.number == last.attempt.number
        assert (
            cluster.run.history.incidents[: len(last.history.incidents)] == last.history.incidents
        )


def job_with_failures(budget: int, failures: int, *, saves: bool = False) -> Cluster:
    """A cluster in which a rank of each of the first `failures` attempts is killed."""
    cluster = Cluster(Random(0), max_restarts=budget)
    cluster.calm = True
    for _ in range(60 * (failures + 1)):
        if cluster.over:
            return cluster
        attempt = cluster.run.attempt.number
        if isinstance(cluster.run.stage, Starting):
            cluster.tell(
                StepReached(at=0.0, attempt=attempt, step=attempt, loss=1.0, tokens_per_second=None)
            )
        elif isinstance(cluster.run.stage, Running) and attempt <= failures:
            if saves:
                cluster.tell(CheckpointSaved(at=0.0, attempt=attempt, step=attempt))
            cluster.tell(exited(attempt % 4, attempt))
        else:
            cluster.end_quietly()
    raise AssertionError("the job does not end")


@settings(deadline=None, max_examples=30)
@given(budgets, st.integers(0, 6))
def test_a_job_succeeds_if_and_only_if_its_failures_are_within_the_budget(
    budget: int, failures: int
) -> None:
    run = job_with_failures(budget, failures).run
    assert run.state == ("SUCCEEDED" if failures <= budget else "FAILED")
    assert run.history.restarts == min(failures, budget)
    assert len(run.history.incidents) == min(failures, budget + 1)


@settings(deadline=None, max_examples=12)
@given(st.integers(1, 4), st.integers(0, 12))
def test_a_job_that_saves_checkpoints_never_spends_its_budget(budget: int, failures: int) -> None:
    run = job_with_failures(budget, failures, saves=True).run
    assert (run.state, run.history.restarts) == ("SUCCEEDED", failures)
