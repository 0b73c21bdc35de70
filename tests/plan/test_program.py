"""The plan of the user's own program."""

import pytest
from msgspec.structs import replace

from orchestrator.contract.codec import decode
from orchestrator.contract.spec.job_spec import ScriptSpec
from orchestrator.errors import PlanError
from orchestrator.inventory.hosts import Host, Inventory
from orchestrator.plan.program import plan_program

SPEC: ScriptSpec = decode(
    ScriptSpec,
    {"name": "mine", "run": {"script": "train.py"}, "cluster": {"hosts": 2, "gpus_per_host": 4}},
)
FREE = Host(name="a", devices=4)
DRAINED = replace(FREE, name="b", state="drained", reason="ECC errors")
SMALL = replace(FREE, name="c", devices=2)


@pytest.mark.parametrize(
    ("hosts", "fix"),
    [
        ((FREE, DRAINED), "--set cluster.hosts=1"),
        ((SMALL, DRAINED), "ask for fewer GPUs per host"),
        ((DRAINED,), "free one of these hosts; `ndctl inventory` shows them all"),
    ],
)
def test_the_fix_for_too_few_hosts_follows_from_the_reason(
    hosts: tuple[Host, ...], fix: str
) -> None:
    with pytest.raises(PlanError) as refused:
        plan_program(SPEC, Inventory(hosts=hosts))
    assert refused.value.fix == fix
