"""How a plan is shown."""

from dataclasses import replace

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import Memory, Plan
from orchestrator.plan.show.explain import describe_plan, plan_json

PLAN = Plan(
    mesh=Mesh(dp_shard=2, tp=2),
    micro_batch_size=4,
    gradient_accumulation=2,
    hosts=("host-0", "host-1"),
    ranks_per_host=2,
    memory=Memory(peak_bytes=3072, items={"parameters": 1024, "activations": 2048}),
    notes=("tp=2 (auto): because",),
)


def test_a_plan_reads_as_mesh_batch_memory_ranks_and_notes() -> None:
    assert (
        describe_plan(PLAN)
        == """\
mesh     dp_shard=2 x tp=2 = 4 ranks on 2 hosts x 2
batch    16 sequences a step = 2 data-parallel x micro batch 4 x 2 accumulated
memory   about 3 KiB on the fullest rank
  parameters      1 KiB  ########
  activations     2 KiB  ################

ranks    rank(dp_shard, tp)
  host-0  0(0,0)  1(0,1)
  host-1  2(1,0)  3(1,1)

- tp=2 (auto): because"""
    )


def test_one_rank_needs_no_coordinates() -> None:
    alone = replace(PLAN, mesh=Mesh(), hosts=("host-0",), ranks_per_host=1, notes=())
    text = describe_plan(alone)
    assert "mesh     1 rank on 1 host x 1" in text
    assert text.endswith("ranks\n  host-0  0")


def test_many_hosts_are_drawn_by_the_first_and_the_last() -> None:
    big = replace(
        PLAN,
        mesh=Mesh(dp_shard=2048, tp=8),
        hosts=tuple(f"host-{i}" for i in range(2048)),
        ranks_per_host=8,
    )
    text = describe_plan(big)
    assert "  … 2041 more hosts\n  host-2047" in text
    assert len(text.splitlines()) < 20


def test_the_json_has_the_keys_that_scripts_rely_on() -> None:
    shown = plan_json(PLAN)
    assert list(shown) == [
        "mesh",
        "world_size",
        "micro_batch_size",
        "gradient_accumulation",
        "activation_checkpointing",
        "methods",
        "hosts",
        "ranks",
        "memory",
        "notes",
    ]
    assert shown["mesh"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2}
    assert shown["ranks"][2] == {
        "rank": 2,
        "host": "host-1",
        "local_rank": 0,
        "coords": {"pp": 0, "dp_replicate": 0, "dp_shard": 1, "cp": 0, "tp": 0},
    }
    assert shown["memory"] == {
        "peak_bytes": 3072,
        "device_bytes": None,
        "worst_rank": "every rank",
        "items": {"parameters": 1024, "activations": 2048},
        "host": {},
    }


def test_methods_are_shown_above_the_memory_and_what_is_offloaded_below() -> None:
    memory = replace(PLAN.memory, host={"optimizer": 2048, "gradients": 1024})
    plan = replace(PLAN, methods={"pipeline": "zbv", "context": "ring"}, memory=memory)
    lines = describe_plan(plan).splitlines()
    assert lines[2:5] == [
        "pipeline zbv",
        "context  ring",
        "memory   about 3 KiB on the fullest rank",
    ]
    assert lines[7] == "  and in the host's memory for each rank: optimizer 2 KiB, gradients 1 KiB"
    assert plan_json(plan)["methods"] == {"pipeline": "zbv", "context": "ring"}
