"""The leader's analysis of a hang, from the evidence of all hosts."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import Allocation
from orchestrator.contract.messages.agent_protocol import Evidence
from orchestrator.contract.messages.events import Event, EvidenceGathered, HangJudged
from orchestrator.diagnosis.cause.hang_event import SHOWN_STACKS, judgement
from orchestrator.diagnosis.dumps.dump import condense, parse
from orchestrator.diagnosis.dumps.dump_summary import to_text
from orchestrator.job.host_state import SchedulerState
from orchestrator.job.progress import Attempt
from orchestrator.job.state import Run
from orchestrator.job.transitions import step
from orchestrator.leader.hang_analysis import HangAnalysis, scene_of
from orchestrator.leader.storage import LeaderFiles
from orchestrator.seams import HostNotice
from tests.agent.world import FakeBackend, TurnedClock, a_job
from tests.e2e.job import ROOT
from tests.job.job_driver import found

FLIGHT = ROOT / "tests" / "captured" / "flight"
STUCK = (
    "Thread 0x01 (most recent call first):",
    '  File "/x/torch/distributed/distributed_c10d.py", line 9 in all_reduce',
    '  File "/x/trainer/step.py", line 9 in run',
    '  File "<x>", line 1 in <module>',
)
ELSEWHERE = (*STUCK[:1], '  File "/x/trainer/data/loader.py", line 40 in of_step', *STUCK[2:])


def evidence(
    host: str, *ranks: int, dumps: Mapping[str, str] | None = None, **more: Any
) -> Evidence:
    rank_evidence = tuple(found(rank, stack=STUCK) for rank in ranks)
    event = EvidenceGathered(attempt=1, host=host, ranks=rank_evidence, **more)
    return Evidence(event=event, dumps=dumps or {})


def summary_of(path: Path, rank: int) -> dict[str, str]:
    return {str(rank): to_text(condense(rank, parse(path.read_bytes())))}


def test_dumps_of_all_hosts_are_merged_and_missing_ones_are_listed() -> None:
    parts = [
        evidence("host-0", 0, dumps=summary_of(FLIGHT / "trace_0", 0)),
        evidence("host-1", 1, dumps={"1": "no dump"}, missing={"kernel log": "not permitted"}),
    ]
    scene, lost = scene_of(parts)
    assert set(scene.dumps) == {0}
    assert scene.host(1) == "host-1"
    assert lost[0].startswith("dump of rank 1 (host-1): not a reduced dump")
    assert lost[1] == "kernel log (host-1): not permitted"
    judged = judgement(scene, at=9.0, attempt=1, missing=lost)
    assert f"missing: {lost[0]}" in judged.signs


def test_the_stack_that_differs_is_shown_among_hundreds_of_ranks() -> None:
    ranks = [evidence(f"host-{host}", *range(8 * host, 8 * host + 8)) for host in range(64)]
    odd = Evidence(
        event=EvidenceGathered(attempt=1, host="host-64", ranks=(found(512, stack=ELSEWHERE),))
    )
    judged = judgement(scene_of([*ranks, odd])[0], at=9.0, attempt=1)
    assert (judged.verdict, judged.ranks, judged.hosts) == ("alone", (512,), ())
    assert len(judged.stacks) == SHOWN_STACKS
    assert judged.stacks["512"] == ELSEWHERE


@pytest.mark.parametrize("many", [1, 100])
def test_missing_evidence_is_listed_up_to_a_limit(many: int) -> None:
    lost = [f"dump of rank {rank}: gone" for rank in range(many)]
    signs = judgement(scene_of([])[0], at=9.0, attempt=1, missing=lost).signs
    assert "missing: dump of rank 0: gone" in signs
    assert ("missing: 92 more pieces of evidence, see the traces" in signs) == (many == 100)
    assert len(signs) < 12


def test_a_rank_that_gives_a_stack_but_withholds_its_dump_is_named_with_its_host() -> None:
    """Its GIL is held, so it has a stack but no dump. Its peers wait in a collective."""
    text = (FLIGHT / "trace_0").read_bytes()
    dumps = {str(rank): to_text(condense(rank, parse(text))) for rank in (0, 1, 3)}
    rank_evidence = [found(rank, stack=STUCK) for rank in (0, 1, 3)]
    ranks = (*rank_evidence, found(2, stack=ELSEWHERE, process_state="R"))
    for withheld, sure in (((2,), True), ((), False)):
        event = EvidenceGathered(attempt=1, host="host-0", ranks=ranks, withheld=withheld)
        part = Evidence(event=event, dumps=dumps)
        judged = judgement(replace(scene_of([part])[0], world=4), at=9.0, attempt=1)
        assert judged.ranks == (2,)
        assert bool(judged.hosts) == sure


@pytest.mark.parametrize(
    ("backend", "hosts", "sign"),
    [
        (
            FakeBackend(flagged=(HostNotice("host-1", "DRAINING", "bad cable"),)),
            {"host-1": "DRAINING: bad cable"},
            "the scheduler says host-1 is DRAINING: bad cable",
        ),
        (
            FakeBackend(mute=True),
            {},
            "missing: the scheduler's report: the scheduler does not answer",
        ),
    ],
)
def test_the_scheduler_state_of_the_hosts_is_in_the_signs_and_in_a_file(
    tmp_path: Path, backend: FakeBackend, hosts: dict[str, str], sign: str
) -> None:
    job, run_dir, clock = a_job(tmp_path), RunDir(tmp_path), TurnedClock()
    run_dir.traces(1).mkdir(parents=True)
    submitted, _ = step(Run(), job)
    names = job.plan.hosts
    granted = Allocation(id="7", restarts=0, hosts=names)
    run = replace(
        submitted,
        scheduler=SchedulerState(allocation=granted),
        attempt=Attempt(placement=names),
    )
    judge = HangAnalysis(job, lambda: run, LeaderFiles(run_dir, clock), backend, clock)
    for rank, host in enumerate(names):
        judge.hear(evidence(host, rank))
    events: list[Event] = []
    asyncio.run(judge.judge(1, events.append, clock.now))
    (judged,) = events
    assert isinstance(judged, HangJudged)
    assert sign in judged.signs
    saved = json.loads((run_dir.traces(1) / "scheduler.json").read_text())
    assert saved["hosts"] == hosts
