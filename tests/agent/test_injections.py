"""Each kind of hang, injected on each mesh axis: the analysis names the right rank, or none.

`tests/e2e/test_hangs.py` tests whole jobs. Here only the ranks are real, with their drills,
dumps and stacks.
"""

import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from orchestrator.app.diagnose_job import judge
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.messages.events import HangDetected, RankExited, StragglerFound
from orchestrator.diagnosis.cause.exits import is_mismatch
from orchestrator.diagnosis.cause.verdict import Culprit
from orchestrator.diagnosis.dumps.load_evidence import read_folder, read_last
from tests.agent.forked_ranks import judge_hang
from tests.agent.ranks_with_leader import run_ranks

pytestmark = pytest.mark.process

AXES = {
    "fsdp": Mesh(dp_shard=4),
    "hsdp": Mesh(dp_replicate=2, dp_shard=2),
    "tp": Mesh(dp_shard=2, tp=2),
    "cp": Mesh(dp_shard=2, cp=2),
    "pp": Mesh(pp=2, dp_shard=2),
    "pp-cp": Mesh(pp=2, cp=2),
}
VICTIM = 2
"""The first rank of the second host, with two ranks per host."""
HOST = "host-1"
ALWAYS = {
    ("busy", "fsdp"),
    ("data", "pp"),
    ("write", "tp"),
    ("skip", "hsdp"),
    ("shape", "cp"),
    ("slow", "pp-cp"),
}


def each(*faults: str) -> list[Any]:
    """All faults on all axes. Most of them are marked slow."""
    return [
        pytest.param(*case, id="-".join(case), marks=() if case in ALWAYS else pytest.mark.slow)
        for case in product(faults, AXES)
    ]


def drill(fault: str) -> dict[str, Any]:
    return {"fault": fault, "index": VICTIM, "step": 3}


@pytest.mark.parametrize(("fault", "axis"), each("busy", "stop", "data", "write"))
def test_a_rank_that_hangs_is_named_with_its_host(fault: str, axis: str, tmp_path: Path) -> None:
    saves = {"checkpoint": {"every_steps": 2}} if fault == "write" else {}
    verdict = judge_hang(tmp_path, AXES[axis], drill(fault), **saves)
    assert verdict.verdict == ("stopped" if fault == "stop" else "never-entered"), verdict
    assert (verdict.scope, verdict.ranks, verdict.hosts) == ("rank", (VICTIM,), (HOST,))
    assert verdict.confidence >= 0.9


@pytest.mark.parametrize(("fault", "axis"), each("skip", "order"))
def test_a_rank_that_skips_or_reorders_a_collective_is_named_without_its_host(
    fault: str, axis: str, tmp_path: Path
) -> None:
    verdict = judge_hang(tmp_path, AXES[axis], drill(fault))
    assert verdict.hosts == (), verdict
    if fault == "skip" and AXES[axis].pp > 1:
        # gloo records no sends and receives. The rank may wait in one of them because of a peer.
        assert (verdict.verdict, verdict.ranks) == ("not-known", ())
        assert f"all others wait for rank {VICTIM}" in verdict.signs[0]
    else:
        assert verdict.verdict in ("skipped", "mismatch")
        assert (verdict.scope, verdict.ranks) == ("user", (VICTIM,))
        assert verdict.confidence >= 0.9


@pytest.mark.parametrize(("fault", "axis"), each("shape"))
def test_a_rank_that_calls_another_size_is_named_without_its_host(
    fault: str, axis: str, tmp_path: Path
) -> None:
    leader = run_ranks(tmp_path, AXES[axis], drill(fault), steps=50)
    (incident,) = leader.run.history.incidents
    assert (incident.failure, incident.scope) == ("collective-mismatch", "user"), incident
    assert incident.culprit == Culprit(rank=VICTIM), incident
    assert f"rank {VICTIM} called another operation than its peers" in incident.cause
    traces = RunDir(tmp_path / "run").traces(1)
    ended = {exited.rank for exited in leader.all_of(RankExited) if is_mismatch(exited)}
    _, verdict = judge(read_folder(traces), read_last(traces), ended)
    assert (verdict.kind, verdict.ranks, verdict.hosts) == ("mismatch", (VICTIM,), ())
    assert leader.all_of(HangDetected) == []


def test_a_rank_that_aborts_because_of_a_peer_is_no_culprit(tmp_path: Path) -> None:
    leader = run_ranks(tmp_path, AXES["fsdp"], None, {VICTIM: {"larger": 3}}, steps=50)
    aborted = [e.rank for e in leader.all_of(RankExited) if e.signal == signal.SIGABRT]
    assert aborted, leader.events
    assert VICTIM not in aborted
    (incident,) = leader.run.history.incidents
    assert (incident.failure, incident.culprit) == ("collective-mismatch", Culprit(rank=VICTIM))


@pytest.mark.parametrize(("fault", "axis"), each("slow"))
def test_only_the_slow_rank_is_named_with_its_host(fault: str, axis: str, tmp_path: Path) -> None:
    leader = run_ranks(tmp_path, AXES[axis], drill(fault), steps=40)
    (found,) = leader.all_of(StragglerFound)
    assert (found.rank, found.host) == (VICTIM, HOST)
    assert found.lost_tokens_per_second > 0
    assert leader.all_of(HangDetected) == []
    assert (leader.run.state, leader.run.history.incidents) == ("SUCCEEDED", ())


@pytest.mark.slow
@pytest.mark.parametrize("axis", AXES)
def test_no_other_rank_is_named_for_a_rank_with_slow_forward_passes(
    axis: str, tmp_path: Path
) -> None:
    """Its peers wait for it in the collectives of the first layer, and it waits for them there."""
    leader = run_ranks(tmp_path, AXES[axis], None, {VICTIM: {"forward": 0.1}}, steps=30)
    assert {found.rank for found in leader.all_of(StragglerFound)} <= {VICTIM}
    assert (leader.run.state, leader.all_of(HangDetected)) == ("SUCCEEDED", [])


@pytest.mark.slow
def test_with_ddp_a_rank_with_slow_forward_passes_is_named(tmp_path: Path) -> None:
    slow, ddp = {VICTIM: {"forward": 0.25}}, {"data": "ddp"}
    leader = run_ranks(tmp_path, Mesh(dp_replicate=4), None, slow, steps=40, parallel=ddp)
    assert leader.run.state == "SUCCEEDED", leader.run.stage.reason
    assert {(one.rank, one.host) for one in leader.all_of(StragglerFound)} == {(VICTIM, HOST)}
