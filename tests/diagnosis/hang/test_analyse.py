"""The culprits of simulated hangs are found, on meshes of all axes."""

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.diagnosis.dumps.dump import condense
from orchestrator.diagnosis.hang.analyse import analyse
from orchestrator.diagnosis.hang.verdicts import Diagnosis, HangEvidence, RankFacts
from tests.diagnosis.simulated_hang import (
    FAULTS,
    JUDGED,
    PROGRAM,
    STOPS,
    Fault,
    random_hang,
    simulate_hang,
)

PLAIN = (1, 1, 4, 1, 2)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_right_rank_is_named(fault: Fault) -> None:
    found = [random_hang(seed, fault) for seed in range(6)]
    assert [analyse(one.scene).ranks for one in found] == [(one.culprit,) for one in found]


@pytest.mark.parametrize(("lost", "least"), [(0.0, 0.98), (0.25, 0.95)])
@pytest.mark.parametrize("num_hangs", [180, pytest.param(540, marks=pytest.mark.slow)])
def test_the_right_rank_is_named_for_all_faults(num_hangs: int, lost: float, least: float) -> None:
    right: Counter[Fault] = Counter()
    wrong_hosts = stops = 0
    for seed in JUDGED[:num_hangs]:
        found = random_hang(seed, FAULTS[seed % len(FAULTS)], lost)
        verdict = analyse(found.scene)
        right[found.fault] += verdict.ranks[:1] == (found.culprit,)
        stops += found.fault in STOPS
        assert found.culprit is not None
        wrong_hosts += bool(verdict.hosts) and found.scene.host(found.culprit) not in verdict.hosts
    assert wrong_hosts <= num_hangs / 100
    assert right.total() >= least * num_hangs
    assert sum(right[fault] for fault in STOPS) >= 0.98 * stops


def test_the_right_rank_is_named_in_jobs_with_an_evaluator() -> None:
    """That rank is in none of the groups that its peers use most."""
    found = [random_hang(seed, FAULTS[seed % len(FAULTS)], evaluator=True) for seed in JUDGED[:180]]
    verdicts = [(one, analyse(one.scene)) for one in found]
    wrong = [one.fault for one, verdict in verdicts if verdict.ranks[:1] != (one.culprit,)]
    assert len(wrong) <= 9
    assert not set(wrong) & set(STOPS)
    for one, verdict in verdicts:
        assert one.culprit is not None
        assert set(verdict.hosts) <= {one.scene.host(one.culprit)}


@pytest.mark.parametrize("fault", PROGRAM)
def test_a_program_whose_ranks_took_two_paths_excludes_no_host(fault: Fault) -> None:
    for seed in range(4):
        verdict = analyse(random_hang(seed, fault).scene)
        assert (verdict.scope, verdict.hosts) == ("user", ())


@pytest.mark.parametrize("blocking", [True, False])
def test_if_all_ranks_entered_and_none_completed_the_network_is_suspected(blocking: bool) -> None:
    for seed in range(6):
        found = simulate_hang(seed, mesh=PLAIN, fault="network", blocking=blocking)
        verdict = analyse(found.scene)
        assert (verdict.kind, verdict.ranks, verdict.hosts) == ("network", (), ())


@pytest.mark.parametrize("lost", [0.5, 0.9, 1.0])
def test_weak_evidence_never_excludes_a_host(lost: float) -> None:
    for seed in range(8):
        found = simulate_hang(
            seed, mesh=PLAIN, fault="skip", lost=lost, lost_stacks=lost, known_mesh=True
        )
        verdict = analyse(found.scene)
        assert found.culprit is not None
        assert set(verdict.hosts) <= {found.scene.host(found.culprit)}


def test_without_evidence_the_verdict_is_not_known() -> None:
    verdict = analyse(HangEvidence(world=8))
    assert (verdict.kind, verdict.ranks, verdict.confidence) == ("not-known", (), 0.0)
    assert "no dump and no stack" in verdict.cause


def test_ranks_are_matched_by_group_and_not_by_number_alone() -> None:
    """The counts of groups are independent of each other, and the buffers have wrapped."""
    found = simulate_hang(5, mesh=(2, 1, 2, 1, 2), fault="loader", buffer=24)
    counts = {
        (group.desc, seat.entered)
        for dump in found.scene.dumps.values()
        for group, seat in dump.seats.items()
    }
    assert len({count for _, count in counts}) > 2
    assert analyse(found.scene).ranks == (found.culprit,)


@pytest.mark.parametrize("blocking", [True, False])
def test_completed_sends_do_not_complete_a_pending_operation(blocking: bool) -> None:
    """torch reports the number of the last operation, even a send, as its last collective."""
    over = 0
    for seed in range(8):
        found = simulate_hang(
            seed, mesh=(2, 1, 4, 1, 1), fault="checkpoint", blocking=blocking, buffer=2000
        )
        for rank, raw in found.raw.items():
            waits = {
                (entry["process_group"], entry["collective_seq_id"])
                for entry in raw["entries"]
                if not entry["retired"] and not entry["is_p2p"]
            }
            seats = found.scene.dumps[rank].seats.items()
            assert waits == {
                ((group.name, group.desc), call.seq)
                for group, seat in seats
                for call in seat.pending
            }
            completed = {
                name: raw["pg_status"][name]["last_completed_collective"] for (name, _), _ in waits
            }
            over += any(seq <= completed[name] for (name, _), seq in waits)
    assert over, "in none of these was the number of a send above that of what was waited in"


def test_a_stopped_process_is_named_without_any_dump() -> None:
    found = simulate_hang(3, mesh=PLAIN, fault="stopped", lost=1.0)
    assert not found.scene.dumps
    verdict = analyse(found.scene)
    assert (verdict.kind, verdict.ranks) == ("stopped", (found.culprit,))
    assert len(verdict.hosts) == 1


PLACE = "rpc_wait_bit_killable of sunrpc"
IN_A_COLLECTIVE = (
    '  File "/venv/torch/distributed/distributed_c10d.py", line 3245 in all_reduce',
    '  File "/job/trainer/main.py", line 40 in <module>',
)


def test_the_place_in_the_kernel_is_part_of_the_verdict() -> None:
    found = simulate_hang(3, mesh=PLAIN, fault="stopped")
    assert found.culprit is not None
    facts = replace(found.scene.facts[found.culprit], process_state="D", place=PLACE, still_s=75.4)
    scene = replace(found.scene, facts={**found.scene.facts, found.culprit: facts})
    verdict = analyse(scene)
    assert (verdict.kind, verdict.ranks) == ("stopped", (found.culprit,))
    begin = f"rank {found.culprit} is blocked in the kernel in {PLACE} (state D), without progress"
    assert verdict.cause.startswith(f"{begin} for 75 s; it did not call"), verdict.cause
    assert not any("state D" in sign for sign in verdict.evidence), "it is said once"


def test_ranks_of_a_host_blocked_in_one_place_are_reported_together() -> None:
    scene = HangEvidence(
        facts={
            rank: RankFacts(
                rank=rank,
                host=f"host-{rank // 2}",
                process_state="D" if rank in (2, 3) else "S",
                asked=True,
                stack=() if rank in (2, 3) else IN_A_COLLECTIVE,
                place=PLACE if rank in (2, 3) else "",
                still_s=60.0 + rank,
            )
            for rank in range(6)
        }
    )
    verdict = analyse(scene)
    assert (verdict.ranks, verdict.hosts) == ((2, 3), ("host-1",))
    assert verdict.cause == f"ranks 2-3 are blocked in the kernel in {PLACE} (state D)"
    elsewhere = {3: replace(scene.facts[3], place="nfs_getattr of nfs")}
    apart = analyse(replace(scene, facts={**scene.facts, **elsewhere}))
    assert apart.cause.endswith("in an uninterruptible wait in the kernel (state D)")


@pytest.mark.parametrize("throttled", [False, True])
def test_a_rank_without_cpu_time_is_reported_as_starved_and_excludes_no_host(
    throttled: bool,
) -> None:
    found = simulate_hang(3, mesh=PLAIN, fault="busy")
    before = analyse(found.scene)
    assert found.culprit is not None
    starved = replace(
        found.scene.facts[found.culprit],
        process_state="R",
        still_s=60.0,
        starved_s=52.0,
        throttled=throttled,
    )
    verdict = analyse(replace(found.scene, facts={**found.scene.facts, found.culprit: starved}))
    assert (verdict.kind, verdict.ranks, verdict.hosts) == (before.kind, before.ranks, ())
    limit = ", and its control group is throttled (cpu.max)" if throttled else ""
    begin = "is starved of CPU (ready to run but without a CPU for 52 of 60 s)"
    assert verdict.cause.startswith(f"rank {found.culprit} {begin}{limit}; it "), verdict.cause
    assert "cpu.max" in verdict.advice
    assert not any("starved" in sign for sign in verdict.evidence), "it is said once"


@pytest.mark.parametrize(
    ("state", "starved_s", "stack"),
    [
        ("S", 52.0, None),  # it ran since
        ("R", 12.0, None),  # a busy host, and no more
        ("R", 52.0, "collective"),  # it waits for others, as one that spins for a GPU
    ],
)
def test_waiting_for_a_cpu_alone_is_not_a_cause(
    state: str, starved_s: float, stack: str | None
) -> None:
    found = simulate_hang(3, mesh=PLAIN, fault="busy")
    assert found.culprit is not None
    other = (found.culprit + 1) % len(found.scene.facts)
    facts = dict(found.scene.facts)
    for rank in (found.culprit, other):
        usual = facts[rank].stack
        facts[rank] = replace(
            facts[rank],
            process_state=state,
            still_s=60.0,
            starved_s=starved_s,
            stack=IN_A_COLLECTIVE if stack else usual,
        )
    verdict = analyse(replace(found.scene, facts=facts))
    assert "starved" not in verdict.cause
    assert other not in verdict.ranks


def test_the_minority_stack_is_named_without_dumps_and_excludes_no_host() -> None:
    found = simulate_hang(3, mesh=PLAIN, fault="loader", lost=1.0)
    verdict = analyse(found.scene)
    assert (verdict.kind, verdict.ranks, verdict.hosts) == ("alone", (found.culprit,), ())


def test_a_host_without_any_evidence_is_named_as_a_whole() -> None:
    found = simulate_hang(3, mesh=(1, 1, 8, 1, 1), fault="stopped", per_host=2)
    assert found.culprit is not None
    host = found.scene.host(found.culprit)
    silent = [rank for rank in found.scene.facts if found.scene.host(rank) == host]
    scene = replace(
        found.scene,
        dumps={rank: dump for rank, dump in found.scene.dumps.items() if rank not in silent},
        facts={
            rank: replace(facts, process_state="T", stack=()) if rank in silent else facts
            for rank, facts in found.scene.facts.items()
        },
    )
    verdict = analyse(scene)
    assert (verdict.ranks, verdict.hosts) == (tuple(silent), (host,))


def test_if_all_stacks_are_equal_there_is_no_culprit() -> None:
    stack = ('  File "/job/data.py", line 3 in read', '  File "/job/main.py", line 9 in <module>')
    facts = {rank: RankFacts(rank=rank, asked=True, stack=stack) for rank in range(4)}
    verdict = analyse(HangEvidence(facts=facts))
    assert (verdict.kind, verdict.ranks) == ("together", ())
    assert "read (job/data.py:3)" in verdict.cause


AT_THE_END = (
    "Thread 0x00007f11 (most recent call first):",
    '  File "/job/upload.py", line 7 in send',
    '  File "/usr/lib/python3.11/threading.py", line 982 in run',
    "Thread 0x00007f12 (most recent call first):",
    '  File "/usr/lib/python3.11/threading.py", line 331 in wait',
    '  File "/x/trainer/program/activity.py", line 26 in _watch',
    "Thread 0x00007f13 (most recent call first):",
)
JOINS = (
    *AT_THE_END,
    '  File "/usr/lib/python3.11/threading.py", line 1590 in _shutdown',
)
JOINS_POOL = (
    *AT_THE_END,
    '  File "/usr/lib/python3.11/threading.py", line 1119 in join',
    '  File "/usr/lib/python3.11/concurrent/futures/thread.py", line 31 in _python_exit',
    '  File "/usr/lib/python3.11/threading.py", line 1583 in _shutdown',
)
IN_A_HANDLER = (
    *AT_THE_END,
    '  File "/usr/lib/python3.11/site-packages/tool/service.py", line 9 in join',
    '  File "/usr/lib/python3.11/threading.py", line 1583 in _shutdown',
)


def at_the_end(stacks: dict[int, tuple[str, ...]], ended: tuple[int, ...] = ()) -> Diagnosis:
    facts = {n: RankFacts(rank=n, host="h", asked=True, stack=one) for n, one in stacks.items()}
    facts |= {n: RankFacts(rank=n, host="h", ended="exit code 0") for n in ended}
    return analyse(HangEvidence(facts=facts))


@pytest.mark.parametrize("stack", [JOINS, JOINS_POOL])
@pytest.mark.parametrize(("ranks", "ended"), [((0,), ()), ((0, 1), ()), ((0,), (1, 2))])
def test_a_program_that_has_ended_and_left_a_thread_is_no_fault_of_a_rank(
    stack: tuple[str, ...], ranks: tuple[int, ...], ended: tuple[int, ...]
) -> None:
    verdict = at_the_end(dict.fromkeys(ranks, stack), ended)
    assert (verdict.kind, verdict.scope, verdict.ranks, verdict.hosts) == ("thread", "user", (), ())
    assert "the program has ended, but one of its non-daemon threads has not" in verdict.cause
    assert verdict.cause.endswith("rank 0 has a thread in send (job/upload.py:7)")


@pytest.mark.parametrize(
    "other",
    [
        (),
        ('  File "/x/torch/distributed/distributed_c10d.py", line 9 in destroy_process_group',),
        IN_A_HANDLER,
    ],
)
def test_a_rank_at_its_end_may_wait_for_one_that_is_elsewhere(other: tuple[str, ...]) -> None:
    assert at_the_end({0: JOINS, 1: other}).kind != "thread"


@pytest.mark.parametrize(
    ("ranks", "who"), [(1, "the only rank is stopped"), (4, "every rank is stopped")]
)
def test_if_no_process_runs_their_state_is_the_cause_without_a_culprit(
    ranks: int, who: str
) -> None:
    """As on an H200, in a job whose only rank was stopped."""
    facts = {
        n: RankFacts(rank=n, host=f"h{n}", asked=True, process_state="T") for n in range(ranks)
    }
    verdict = analyse(HangEvidence(facts=facts, world=ranks))
    assert (verdict.kind, verdict.ranks, verdict.hosts) == ("stopped", (), ())
    assert who in verdict.cause


def test_ranks_without_facts_may_be_running() -> None:
    facts = {0: RankFacts(rank=0, host="h0", asked=True, process_state="T")}
    assert analyse(HangEvidence(facts=facts, world=2)).kind != "stopped"


def test_a_rank_on_another_path_is_named_before_ranks_without_a_dump() -> None:
    found = simulate_hang(2, mesh=(1, 2, 4, 1, 1), fault="skip", known_mesh=True)
    assert found.culprit is not None
    silent = {(found.culprit + 1) % 8, (found.culprit + 2) % 8}
    dumps = {rank: dump for rank, dump in found.scene.dumps.items() if rank not in silent}
    verdict = analyse(replace(found.scene, dumps=dumps))
    assert (verdict.kind, verdict.ranks, verdict.hosts) == ("skipped", (found.culprit,), ())
    assert "took another path through the program than its peers" in verdict.cause


def test_a_rank_without_a_dump_in_another_operation_is_named() -> None:
    """Two of four ranks have no dump. The stack of one of them differs from ranks that wait."""
    found = simulate_hang(1, mesh=(1, 1, 4, 1, 1), fault="kind", blocking=True)
    assert found.culprit is not None
    other = (found.culprit + 1) % 4
    dumps = {r: d for r, d in found.scene.dumps.items() if r not in (found.culprit, other)}
    verdict = analyse(replace(found.scene, dumps=dumps))
    assert (verdict.ranks, verdict.hosts) == ((found.culprit,), ())


@pytest.mark.parametrize("seed", [4, 9])
def test_a_rank_without_a_dump_that_peers_continued_with_skipped_it(seed: int) -> None:
    """Both members of a group have no dump. One of them took part in an operation of another group
    which comes after the operation that its group waits in."""
    found = simulate_hang(seed, mesh=PLAIN, fault="skip", known_mesh=True, buffer=2000)
    assert found.culprit is not None
    silent = {found.culprit, (found.culprit + 2) % 8}
    dumps = {rank: dump for rank, dump in found.scene.dumps.items() if rank not in silent}
    verdict = analyse(replace(found.scene, dumps=dumps))
    assert (verdict.kind, verdict.ranks, verdict.hosts) == ("skipped", (found.culprit,), ())
    assert "which is later" in verdict.evidence[0]


def test_a_stopped_process_is_named_before_any_guess() -> None:
    found = random_hang(10_422, "stopped", lost=0.25)
    assert analyse(replace(found.scene, facts={})).ranks != (found.culprit,)
    verdict = analyse(found.scene)
    assert (verdict.kind, verdict.ranks) == ("stopped", (found.culprit,))
    assert "state T" in verdict.cause
    assert "kill -CONT" in verdict.advice


def test_calls_of_another_thread_are_not_another_path() -> None:
    """Ranks that save in the background call it between different steps. No rank calls it more
    often."""
    dumps = {}
    for rank in range(4):
        saves = [1] if rank == 2 else [1, 2]
        calls = [("main", "default_pg", seq) for seq in range(1, 9)]
        for seq in saves:
            calls.insert(2 * seq + (rank == 2), ("beside", "checkpoint", seq))
        entries = [_called(thread, desc, seq) for thread, desc, seq in calls]
        dumps[rank] = condense(rank, {"entries": entries})
    assert len(dumps[2].paths) == 2
    verdict = analyse(HangEvidence(dumps=dumps))
    assert (verdict.kind, verdict.ranks) == ("never-entered", (2,))


def _called(thread: str, desc: str, seq: int) -> dict[str, Any]:
    return {
        "thread_id": thread,
        "process_group": (desc, desc),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "profiling_name": "gloo:all_gather",
        "input_sizes": [[1]],
        "output_sizes": [[1]],
        "state": "scheduled",
        "retired": (desc, seq) != ("checkpoint", 2),
        "is_p2p": False,
    }
