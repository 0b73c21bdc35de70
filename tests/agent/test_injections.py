"""Each way to hang, injected on each axis: who is blamed, and that nobody is blamed wrongly.

`tests/e2e/test_hangs.py` has whole jobs that hang; here the ranks, their drills, dumps and stacks
are as real, and nothing else is there.
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
from tests.agent.injected import judged
from tests.agent.watched import watched

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
"""Of two ranks to a host: the second host's first."""
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
    """All faults on all axes; most of them are too many for every run."""
    return [
        pytest.param(*case, id="-".join(case), marks=() if case in ALWAYS else pytest.mark.slow)
        for case in product(faults, AXES)
    ]


def drill(fault: str) -> dict[str, Any]:
    return {"fault": fault, "index": VICTIM, "step": 3}


@pytest.mark.parametrize(("fault", "axis"), each("busy", "stop", "data", "write"))
def test_a_rank_that_gets_no_further_is_named_with_its_host(
    fault: str, axis: str, tmp_path: Path
) -> None:
    saves = {"checkpoint": {"every_steps": 2}} if fault == "write" else {}
    said = judged(tmp_path, AXES[axis], drill(fault), **saves)
    assert said.verdict == ("stopped" if fault == "stop" else "never-entered"), said
    assert (said.scope, said.ranks, said.hosts) == ("rank", (VICTIM,), (HOST,))
    assert said.confidence >= 0.9


@pytest.mark.parametrize(("fault", "axis"), each("skip", "order"))
def test_a_rank_that_takes_another_way_is_named_and_no_host_is(
    fault: str, axis: str, tmp_path: Path
) -> None:
    said = judged(tmp_path, AXES[axis], drill(fault))
    assert said.hosts == (), said
    if fault == "skip" and AXES[axis].pp > 1:
        # gloo's recorder knows no sends and receives: that it waits in one may be their fault.
        assert (said.verdict, said.ranks) == ("not-known", ())
        assert f"all others wait for rank {VICTIM}" in said.signs[0]
    else:
        assert said.verdict in ("skipped", "mismatch")
        assert (said.scope, said.ranks) == ("user", (VICTIM,))
        assert said.confidence >= 0.9


@pytest.mark.parametrize(("fault", "axis"), each("shape"))
def test_who_called_another_size_is_named_though_ranks_end_by_it_and_no_host_is(
    fault: str, axis: str, tmp_path: Path
) -> None:
    leader = watched(tmp_path, AXES[axis], drill(fault), steps=50)
    (incident,) = leader.run.history.incidents
    assert (incident.failure, incident.scope) == ("collective-mismatch", "user"), incident
    assert incident.culprit == Culprit(rank=VICTIM), incident
    assert f"rank {VICTIM} called another operation than its peers" in incident.cause
    traces = RunDir(tmp_path / "run").traces(1)
    ended = {exited.rank for exited in leader.all_of(RankExited) if is_mismatch(exited)}
    _, said = judge(read_folder(traces), read_last(traces), ended)
    assert (said.kind, said.ranks, said.hosts) == ("mismatch", (VICTIM,), ())
    assert leader.all_of(HangDetected) == []


def test_a_rank_that_a_peer_sent_too_much_is_ended_and_not_blamed(tmp_path: Path) -> None:
    leader = watched(tmp_path, AXES["fsdp"], None, {VICTIM: {"larger": 3}}, steps=50)
    aborted = [e.rank for e in leader.all_of(RankExited) if e.signal == signal.SIGABRT]
    assert aborted, leader.events
    assert VICTIM not in aborted
    (incident,) = leader.run.history.incidents
    assert (incident.failure, incident.culprit) == ("collective-mismatch", Culprit(rank=VICTIM))


@pytest.mark.parametrize(("fault", "axis"), each("slow"))
def test_a_slow_rank_is_named_with_its_host_and_nobody_else(
    fault: str, axis: str, tmp_path: Path
) -> None:
    leader = watched(tmp_path, AXES[axis], drill(fault), steps=40)
    (found,) = leader.all_of(StragglerFound)
    assert (found.rank, found.host) == (VICTIM, HOST)
    assert found.lost_tokens_per_second > 0
    assert leader.all_of(HangDetected) == []
    assert (leader.run.state, leader.run.history.incidents) == ("SUCCEEDED", ())


@pytest.mark.slow
@pytest.mark.parametrize("axis", AXES)
def test_of_a_rank_that_is_slow_inside_its_passes_no_other_is_named(
    axis: str, tmp_path: Path
) -> None:
    """Its peers wait for it in the first layer's collectives, as it does for them."""
    leader = watched(tmp_path, AXES[axis], None, {VICTIM: {"forward": 0.1}}, steps=30)
    assert {found.rank for found in leader.all_of(StragglerFound)} <= {VICTIM}
    assert (leader.run.state, leader.all_of(HangDetected)) == ("SUCCEEDED", [])


@pytest.mark.slow
def test_where_ranks_pass_alone_one_that_is_slow_at_it_is_named(tmp_path: Path) -> None:
    slow, ddp = {VICTIM: {"forward": 0.25}}, {"data": "ddp"}
    leader = watched(tmp_path, Mesh(dp_replicate=4), None, slow, steps=40, parallel=ddp)
    assert leader.run.state == "SUCCEEDED", leader.run.stage.reason
    assert {(one.rank, one.host) for one in leader.all_of(StragglerFound)} == {(VICTIM, HOST)}
