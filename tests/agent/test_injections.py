"""Each way to hang, injected on each axis: who is blamed, and that nobody is blamed wrongly."""

from pathlib import Path

import pytest

from orchestrator.contract.mesh import Mesh
from tests.agent.injected import judged

AXES = {
    "fsdp": Mesh(dp_shard=4),
    "hsdp": Mesh(dp_replicate=2, dp_shard=2),
    "tp": Mesh(dp_shard=2, tp=2),
    "cp": Mesh(dp_shard=2, cp=2),
    "pp": Mesh(pp=2, dp_shard=2),
    "pp-cp": Mesh(pp=2, cp=2),
}


@pytest.mark.process
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("fault", ["busy", "stop", "data", "write", "skip", "shape", "order"])
def test_x(fault: str, axis: str, tmp_path: Path) -> None:
    changes = {"checkpoint": {"every_steps": 2}} if fault == "write" else {}
    said = judged(tmp_path, AXES[axis], {"fault": fault, "index": 2, "step": 3}, **changes)
    with open("/tmp/inj/verdicts", "a") as f:
        print(fault, axis, said.verdict, said.scope, said.ranks, said.hosts, said.confidence, said.cause, *said.signs, *said.waiting, sep="\n   ", file=f)
