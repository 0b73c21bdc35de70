"""The choices of the planner for known jobs, so that a refactoring does not change them unnoticed.

A change of the cost or memory model may change a choice. Check the new choice, then write the file
with `python -m tests.plan.test_golden`.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from orchestrator.contract.codec import encode
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.contract.spec.model_presets import PRESETS
from orchestrator.inventory.file import load_inventory
from orchestrator.inventory.hosts import Inventory
from orchestrator.inventory.local import local_inventory
from orchestrator.load import of_the_trainer, read_spec
from orchestrator.plan.planner import plan

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
GOLDEN = HERE / "golden_plans.json"
SMALL = ("quickstart", "pipeline-context", "qwen3-hsdp", "slurm", "kubernetes")
BLOCKS = "{profile: b200-sxm-180gb, hosts: 72, devices_per_host: 4, hosts_per_nvlink_block: 18}"
LARGE = {
    "8b": ("llama3-8b", ()),
    "8b memory": ("llama3-8b", ("objective=memory",)),
    "8b fewest hosts": ("llama3-8b", ("objective=fewest_hosts", "cluster.hosts=4")),
    "8b adapters": ("llama3-8b", ("model.lora={}", "parallel.data=zero1")),
    "8b long": ("llama3-8b", ("cluster.hosts=8", "data.sequence_length=8192", "parallel.cp=4")),
    "70b": ("llama3-70b", ()),
    "70b pipeline": ("llama3-70b", ("parallel.pp=4", "parallel.pipeline.schedule=zbv")),
    "70b interleaved": ("llama3-70b", ("parallel.pp=8", "parallel.pipeline.stages_per_rank=2")),
    "70b tp": ("llama3-70b", ("parallel.tp=8", "train.micro_batch_size=2")),
    "70b blocks": ("llama3-70b", ("cluster.gpus_per_host=4", "parallel.tp=8", "parallel.pp=1")),
    "405b 1024 hosts": ("llama3-405b", ("cluster.hosts=1024",)),
}


@cache
def h100() -> Inventory:
    path = EXAMPLES / "inventories" / "h100.yaml"
    return load_inventory(path.read_text(), str(path))


def hosts(spec: JobSpec, where: str) -> Inventory:
    match where:
        case "local":
            return local_inventory(spec.cluster)
        case "blocks":
            return load_inventory(BLOCKS, "blocks")
        case _:
            return h100()


def cases() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    for example in SMALL:
        yield example, example, (), "local"
    for name, (example, sets) in LARGE.items():
        yield name, example, sets, "blocks" if "blocks" in name else "h100"


def chosen(example: str, sets: tuple[str, ...], where: str) -> dict[str, Any]:
    """The parts of a plan that decide how the job runs."""
    spec = of_the_trainer(read_spec(EXAMPLES / f"{example}.yaml", sets), "this test")
    assert spec.model.preset is not None
    found = plan(spec, hosts(spec, where), PRESETS[spec.model.preset])
    assert found.choice is not None
    choice = {"mesh": str(found.choice.mesh), "mfu": f"{found.choice.mfu:.4f}"}
    pipeline = found.pipeline and f"{found.pipeline.schedule} x {found.pipeline.stages_per_rank}"
    return {
        **(encode(found.choice) | choice),
        "pipeline": pipeline,
        "alternatives": "; ".join(str(one.mesh) for one in found.alternatives),
        "hosts": f"{len(found.hosts)}: {found.hosts[0]} to {found.hosts[-1]}",
        "rejected": ", ".join(f"{one.count} {one.family}" for one in found.rejected),
    }


@pytest.mark.parametrize(
    ("name", "example", "sets", "where"), list(cases()), ids=[case[0] for case in cases()]
)
def test_choices_equal_the_golden_ones(
    name: str, example: str, sets: tuple[str, ...], where: str
) -> None:
    golden = json.loads(GOLDEN.read_text())
    found = json.loads(json.dumps(chosen(example, sets, where)))
    for figure in ("step_s", "tokens_per_second_per_device"):
        assert found.pop(figure) == pytest.approx(golden[name].pop(figure))
    assert found == golden[name]


if __name__ == "__main__":
    body = {name: chosen(example, sets, where) for name, example, sets, where in cases()}
    GOLDEN.write_text(json.dumps(body, indent=1) + "\n")
