"""Each way to hang, injected on each axis: who is blamed, and that nobody is blamed wrongly.

`tests/e2e/test_hangs.py` has whole jobs that hang; here the ranks, their drills, dumps and stacks
are as real, and nothing else is there.
"""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from orchestrator.contract.mesh import Mesh
from tests.agent.injected import judged

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
ALWAYS = {("busy", "fsdp"), ("data", "pp"), ("write", "tp"), ("skip", "hsdp")}


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
    assert said.verdict == "never-entered", said
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
