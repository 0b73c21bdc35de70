"""New plans for a job that lost hosts or ran out of memory."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from orchestrator.app.planning import plans
from orchestrator.app.planning.replan import refit, replan
from orchestrator.contract.codec import decode
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.plan import Plan
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.contract.spec.model_presets import PRESETS
from orchestrator.errors import PlanError
from orchestrator.inventory.file import load_inventory
from orchestrator.inventory.hosts import Inventory
from orchestrator.job.plans import Shortage
from orchestrator.load import dump_spec, of_the_trainer, read_spec
from orchestrator.plan.placement.place import place
from orchestrator.plan.planner import plan
from orchestrator.plan.show.explain import plan_json
from tests.jobs_on_disk import submission

HOSTS = ("host-0", "host-2", "host-3")
"""The hosts that the job still has."""
FOUR = ("cluster.hosts=4", "train.global_batch_size=8", "parallel.tp=2")


def a_run(root: Path, *overrides: str) -> tuple[RunDir, plans.Planned]:
    """The run directory after `submit` of a job with four hosts of two ranks each."""
    planned = submission(root, *FOUR, *overrides).planned
    run_dir = RunDir(root)
    run_dir.spec.write_text(dump_spec(planned.spec))
    run_dir.plan(1).write_text(json.dumps(plan_json(planned.plan)))
    return run_dir, planned


def trained_by(run_dir: RunDir, number: int) -> TrainingConfig:
    found: TrainingConfig = decode(
        TrainingConfig, json.loads(run_dir.trainer_config(number).read_text())
    )
    return found


def samples(plan: Plan) -> int:
    assert plan.micro_batch_size is not None
    assert plan.gradient_accumulation is not None
    return plan.mesh.data_parallel * plan.micro_batch_size * plan.gradient_accumulation


def test_fewer_hosts_train_the_same_global_batch(tmp_path: Path) -> None:
    run_dir, planned = a_run(tmp_path, "train.micro_batch_size=1")
    former = planned.plan
    found = replan(run_dir, former, HOSTS[:2], {}, {})
    assert (len(former.hosts), found.plan.hosts) == (4, HOSTS[:2])
    assert found.plan.mesh.tp == former.mesh.tp == 2
    assert samples(found.plan) == samples(former) == 8
    assert former.gradient_accumulation is not None
    assert found.plan.gradient_accumulation == 2 * former.gradient_accumulation
    written = json.loads(run_dir.plan(found.number).read_text())
    assert written["mesh"]["dp_shard"] * written["mesh"]["dp_replicate"] == 2
    config = trained_by(run_dir, found.number)
    assert config.mesh == found.plan.mesh
    assert config.gradient_accumulation == found.plan.gradient_accumulation


def test_a_count_that_does_not_divide_the_batch_is_skipped(tmp_path: Path) -> None:
    run_dir, planned = a_run(tmp_path)
    found = replan(run_dir, planned.plan, HOSTS[:3], {}, {})
    assert len(found.plan.hosts) == 2, "8 samples cannot be dealt to 3 copies"
    assert samples(found.plan) == 8


def test_never_fewer_hosts_than_the_spec_allows(tmp_path: Path) -> None:
    run_dir, planned = a_run(tmp_path, "resilience.min_hosts=3")
    with pytest.raises(PlanError) as refused:
        replan(run_dir, planned.plan, HOSTS[:3], {}, {})
    assert "8" in str(refused.value), "why the largest number of hosts cannot"
    with pytest.raises(PlanError, match="2 hosts are fewer than resilience"):
        replan(run_dir, planned.plan, HOSTS[:2], {}, {})
    assert not run_dir.plan(2).exists()


def test_each_plan_has_a_new_number(tmp_path: Path) -> None:
    run_dir, planned = a_run(tmp_path)
    run_dir.plan(7).write_text("{}")
    (tmp_path / "plan-9-of-mine.json").write_text("{}")
    first, second = (replan(run_dir, planned.plan, HOSTS[:2], {}, {}).number for _ in range(2))
    assert (first, second) == (8, 9)
    assert run_dir.trainer_config(8).exists()
    assert run_dir.plan(7).read_text() == "{}"


def in_blocks(count: int, per_block: int) -> Inventory:
    """Hosts of two devices, in blocks."""
    keys = f"hosts: {count}, devices_per_host: 2, hosts_per_leaf: 6"
    text = f"{{profile: b200-sxm-180gb, {keys}, hosts_per_nvlink_block: {per_block}}}"
    return load_inventory(text, "a test")


def test_groups_wider_than_a_host_are_replanned_in_the_remaining_blocks(
    tmp_path: Path,
) -> None:
    keys = {"pp": 1, "cp": 1, "tp": 4}
    spec: JobSpec = decode(
        JobSpec,
        {
            "name": "wide",
            "model": {"preset": "llama3-8b"},
            "data": {"files": "x", "sequence_length": 1024},
            "train": {"steps": 1, "global_batch_size": 16, "dtype": "bfloat16"},
            "parallel": keys,
            "cluster": {"hosts": 4, "gpus_per_host": 2},
            "resilience": {"shrink": True, "min_hosts": 1},
        },
    )
    former = plan(spec, in_blocks(6, 3), PRESETS["llama3-8b"])
    one, another = (former.hosts[:2], former.hosts[2:])
    left = [host for host in former.switches if host not in one]
    run_dir = RunDir(tmp_path)
    run_dir.spec.write_text(dump_spec(spec))
    found = replan(run_dir, former, left, former.switches, {}).plan
    assert found.mesh.tp == 4
    assert set(found.hosts) <= set(left), "of four hosts that are left, one is alone in its block"
    assert len({former.switches[host] for host in found.hosts}) == 1
    assert found.switches == former.switches
    assert {row.level for row in found.communication if row.axis == "tp"} == {"nvlink block"}
    assert place(found, left, former.hosts, switches=found.switches) == another


# Less memory


FIXED = {"pp": 1, "dp_replicate": 1, "cp": 1, "tp": 1}


def llama(
    tmp_path: Path, *, fixed: bool = False, hosts: int = 2, **train: Any
) -> tuple[RunDir, Plan]:
    """A model with 8e9 weights on hosts of eight H100s."""
    values = {"steps": 1, "global_batch_size": 64, "dtype": "bfloat16", **train}
    spec: JobSpec = decode(
        JobSpec,
        {
            "name": "short",
            "model": {"preset": "llama3-8b"},
            "data": {"files": "x", "sequence_length": 4096},
            "train": values,
            "parallel": {**FIXED, "dp_shard": 8 * hosts} if fixed else {},
            "cluster": {"hosts": hosts, "gpus_per_host": 8},
        },
    )
    inventory = load_inventory("{profile: h100-sxm-80gb, hosts: 2, devices_per_host: 8}", "a test")
    run_dir = RunDir(tmp_path)
    run_dir.spec.write_text(dump_spec(spec))
    return run_dir, plan(spec, inventory, PRESETS["llama3-8b"])


def shortage(device_bytes: float, *, adopt: bool) -> Shortage:
    return Shortage(device_bytes=int(device_bytes), adopt=adopt, words="")


def job_of(path: Path, edits: list[str]) -> JobSpec:
    return of_the_trainer(read_spec(path, edits), "this test")


def edits_of(way: str) -> list[str]:
    """The `--set` options of an alternative."""
    return [word for word in shlex.split(way.partition("  (")[0]) if word != "--set"]


def test_after_out_of_memory_the_fastest_plan_that_needs_less_is_chosen(
    tmp_path: Path,
) -> None:
    run_dir, former = llama(tmp_path)
    peak, others = former.needs.peak_bytes, []
    for _ in range(3):
        short = shortage(0.95 * former.needs.peak_bytes, adopt=True)
        found = refit(run_dir, former, former.hosts, {}, short, {})
        assert found.found is not None
        after = found.found.plan
        assert after.needs.peak_bytes <= short.device_bytes < former.needs.peak_bytes
        assert after.hosts == former.hosts
        assert samples(after) == samples(former) == 64
        config = trained_by(run_dir, found.found.number)
        assert config.micro_batch_size == after.micro_batch_size
        assert config.train.activation_checkpointing == after.activation_checkpointing
        assert found.why == found.ways[0]
        others.append(after.choice)
        former = after
    assert len(set(map(str, others))) == 3, "never the same one twice"
    assert former.needs.peak_bytes < peak


def test_every_alternative_that_is_shown_gives_a_plan_that_fits(tmp_path: Path) -> None:
    run_dir, former = llama(tmp_path)
    limit = 0.6 * former.needs.peak_bytes
    found = refit(run_dir, former, former.hosts, {}, shortage(limit, adopt=False), {})
    assert (found.found, found.why, len(found.ways)) == (None, "resilience.on_oom is stop", 3)
    assert not run_dir.plan(1).exists(), "nothing was planned"
    inventory = load_inventory("{profile: h100-sxm-80gb, hosts: 2, devices_per_host: 8}", "a test")
    for way in found.ways:
        again = plan(job_of(run_dir.spec, edits_of(way)), inventory, PRESETS["llama3-8b"])
        assert again.needs.peak_bytes <= limit, "with the memory that was believed before"


def test_fixed_values_may_change_if_training_stays_the_same(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"micro_batch_size": 1, "activation_checkpointing": "none"}
    run_dir, former = llama(tmp_path, fixed=True, **keys)
    limit = 0.5 * former.needs.peak_bytes
    found = refit(run_dir, former, former.hosts, {}, shortage(limit, adopt=True), {})
    assert found.found is not None
    assert found.found.plan.needs.peak_bytes <= limit
    assert found.why == found.ways[0]
    edits = edits_of(found.why)
    assert "train.activation_checkpointing=elementwise" in edits
    assert samples(found.found.plan) == samples(former)


HOSTS_OF_H100 = "{profile: h100-sxm-80gb, hosts: 8, devices_per_host: 8}"


@pytest.mark.parametrize(
    ("train", "cluster", "less"),
    [
        ({"micro_batch_size": 1, "activation_checkpointing": "none"}, 2, 0.95),
        ({"micro_batch_size": 1, "activation_checkpointing": "none"}, 2, 0.7),
        ({"micro_batch_size": 1, "activation_checkpointing": "full"}, 2, 0.95),
        ({"micro_batch_size": 1}, 1, 0.5),
    ],
)
def test_an_alternative_never_gives_the_plan_that_did_not_fit(
    tmp_path: Path, train: dict[str, Any], cluster: int, less: float
) -> None:
    """A resume plans with the full memory of the device again."""
    run_dir, former = llama(tmp_path, fixed=True, hosts=cluster, **train)
    limit = int(less * former.needs.peak_bytes)
    found = refit(run_dir, former, former.hosts, {}, shortage(limit, adopt=False), {})
    assert len({*found.ways}) == 3
    inventory = load_inventory(HOSTS_OF_H100, "a test")
    for way in found.ways:
        assert "=auto" not in way
        assert "a step" in way, "what it costs is said"
        again = plan(job_of(run_dir.spec, edits_of(way)), inventory, PRESETS["llama3-8b"])
        assert again.needs.peak_bytes <= limit, way


def test_if_no_plan_fits_none_is_returned(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"micro_batch_size": 1, "activation_checkpointing": "full"}
    run_dir, former = llama(tmp_path, fixed=True, **keys)
    found = refit(run_dir, former, former.hosts, {}, shortage(1 << 30, adopt=True), {})
    assert (found.found, found.why) == (None, "no plan with the same training needs less memory")
    assert not run_dir.plan(1).exists()
