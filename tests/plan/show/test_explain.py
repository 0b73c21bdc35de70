"""The text and the JSON of a plan."""

from msgspec.structs import replace

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import Choice, Memory, ModelWork, Plan, Rejected, StepTime, Traffic
from orchestrator.plan.show.explain import describe_plan, plan_json
from orchestrator.plan.show.tables import WIDTH

GIB = 1 << 30
PLAN = Plan(
    mesh=Mesh(dp_shard=2, tp=2),
    micro_batch_size=4,
    gradient_accumulation=2,
    hosts=("host-0", "host-1"),
    ranks_per_host=2,
    profile="h100-sxm-80gb",
    memory=Memory(
        peak_bytes=30 * GIB,
        device_bytes=60 * GIB,
        items={"parameters": 10 * GIB, "activations": 20 * GIB},
        peak_bytes_range=(29 * GIB, 32 * GIB),
        basis="72 traced steps of the trainer, and the allocators of 43 published runs",
    ),
    time=StepTime(
        step_s=2.0,
        tokens_per_second_per_device=4096.0,
        mfu=0.4,
        parts={"compute": 1.5, "communication": 0.5},
        confidence="12 comparable published runs",
        tokens_per_second_per_device_range=(3900.0, 4500.0),
    ),
    communication=(
        Traffic(
            axis="tp",
            collective="all-gather",
            what="activations",
            bytes_per_step=1_500_000_000,
            messages=64,
            level="host",
            seconds=0.01,
            exposed_seconds=0.0,
            ideal_seconds=0.003,
        ),
    ),
    alternatives=(
        Choice(
            mesh=Mesh(dp_shard=4),
            micro_batch_size=1,
            gradient_accumulation=4,
            activation_checkpointing="full",
            reshard_after_forward=False,
            schedule=None,
            step_s=2.5,
            tokens_per_second_per_device=3277.0,
            mfu=0.32,
            peak_bytes=40 * GIB,
        ),
    ),
    rejected=(Rejected(family="tp=4", constraint="its groups stay inside a host", count=1),),
    notes=("because",),
)


def test_a_plan_shows_mesh_speed_memory_traffic_ranks_alternatives_and_notes() -> None:
    assert (
        describe_plan(PLAN)
        == """\
mesh          dp_shard=2 x tp=2 = 4 ranks on 2 hosts x 2 of h100-sxm-80gb
batch         16 sequences per step = 2 data-parallel ranks x micro batch 4 x 2 accumulated
recompute     none: all activations are kept

speed         2.00 s per step, 4,096 tokens/s per device, 40.0% MFU
accuracy      3,900 to 4,500 tokens/s per device: 12 comparable published runs
  compute        1.50 s  75.0%        ##############################
  communication  500 ms  25.0%        ##########

memory        about 30 GiB of 60 GiB on the fullest rank
              29 GiB to 32 GiB: 72 traced steps of the trainer, and the allocators of 43 published
              runs
  every rank [PPPPPPPPPPAAAAAAAAAAAAAAAAAAAA..............................] 30 GiB of 60 GiB
  A activations 20 GiB, P parameters 10 GiB

traffic       sent per step by the slowest rank; ideal: at the links' nominal rate; exposed: not
              hidden by compute
  axis  collective  of           crosses  per step  calls    ideal     time  exposed
  tp    all-gather  activations  host      1.50 GB     64  3.00 ms  10.0 ms   hidden

ranks         one row per host, one column per device; each device shows tp
  host    rank  dp_shard  0  1
  host-0     0         0  0  1
  host-1     2         1  0  1

alternatives  the best plan of each other kind of mesh; the first line is the plan
  mesh        micro  recompute     schedule    step    MFU  memory  slower
  shard2 tp2  4 x 2  none          -         2.00 s  40.0%  30 GiB
  shard4      1 x 4  full, ZeRO-2  -         2.50 s  32.0%  40 GiB  +25.0%

rejected      of 3 ways to multiply the degrees to 4 ranks
  1  tp=4: its groups stay inside a host

- because"""
    )


def test_a_device_has_the_coordinates_that_differ_within_its_host() -> None:
    inside = replace(PLAN, mesh=Mesh(dp_shard=2, cp=2, tp=2), ranks_per_host=4)
    text = describe_plan(inside)
    assert "each device shows cp, tp" in text
    assert "  host-1     4         1  0,0  0,1  1,0  1,1" in text
    across = replace(PLAN, mesh=Mesh(pp=2, tp=2), ranks_per_host=2)
    assert "  host    rank  pp  0  1" in describe_plan(across)


def test_one_rank_needs_no_coordinates() -> None:
    alone = replace(PLAN, mesh=Mesh(), hosts=("host-0",), ranks_per_host=1, notes=())
    assert "mesh          1 rank on 1 host x 1" in describe_plan(alone)
    assert "  host-0     0  *" in describe_plan(alone)


def test_only_the_first_and_the_last_of_many_hosts_are_drawn() -> None:
    big = replace(
        PLAN,
        mesh=Mesh(pp=4, dp_replicate=2, dp_shard=256, tp=8),
        hosts=tuple(f"host-{i:04}" for i in range(2048)),
        ranks_per_host=8,
    )
    lines = describe_plan(big).splitlines()
    assert "  … 2,042 more hosts" in lines
    assert any(line.startswith("  host-2047  16376   3") for line in lines)
    assert max(map(len, lines)) <= WIDTH
    assert len(lines) < 50


def test_a_rank_at_or_over_its_limit_fills_its_bar() -> None:
    for peak, device in ((60, 60), (90, 60)):
        memory = Memory(
            peak_bytes=peak * GIB, device_bytes=device * GIB, items={"optimizer": peak * GIB}
        )
        assert f"[{'O' * 60}]" in describe_plan(replace(PLAN, memory=memory))


def stage(number: int, gib: int) -> Memory:
    return replace(
        PLAN.needs,
        peak_bytes=gib * GIB,
        worst_rank=f"pp stage {number}",
        items={"activations": gib * GIB},
    )


def test_a_pipeline_has_a_bar_for_each_kind_of_rank() -> None:
    pipe = replace(
        PLAN, memory_along_pp=(stage(0, 30), *(stage(n, 20) for n in (1, 2)), stage(3, 25))
    )
    bars = [line for line in describe_plan(pipe).splitlines() if "[" in line]
    assert bars == [
        f"  pp stage 0   [{'A' * 30}{'.' * 30}] 30 GiB of 60 GiB",
        f"  pp stage 1-2 [{'A' * 20}{'.' * 40}] 20 GiB of 60 GiB",
        f"  pp stage 3   [{'A' * 25}{'.' * 35}] 25 GiB of 60 GiB",
    ]
    assert "  on the fullest rank: A activations 30 GiB\n" in describe_plan(pipe)


def test_only_the_fullest_of_many_kinds_of_ranks_are_drawn() -> None:
    deep = replace(PLAN, memory_along_pp=tuple(stage(n, 40 - n) for n in range(16)))
    told = describe_plan(deep)
    assert "pp stage 7 " in told
    assert "pp stage 8 " not in told
    assert "  … and 8 with less" in told


def test_items_with_different_peak_times_are_scaled_with_a_note() -> None:
    memory = replace(PLAN.needs, peak_bytes=20 * GIB)
    told = describe_plan(replace(PLAN, memory=memory))
    assert f"[{'P' * 7}{'A' * 13}{'.' * 40}] 20 GiB of 60 GiB" in told
    assert "P parameters 10 GiB; these are the items' own peaks, which add" in told


def test_work_has_the_flops_of_recomputation_and_traffic_its_multiples_of_the_weights() -> None:
    work = ModelWork(
        parameters=1_000_000_000,
        dtype="bfloat16",
        weight_bytes=2_000_000_000,
        flops=3e15,
        recomputed_flops=7.5e14,
    )
    text = describe_plan(replace(PLAN, work=work))
    assert "work          3.00 PFLOP per step, 1.00B parameters; recomputation 750 TFLOP" in text
    assert "more, 25.0%" in text
    assert "  in multiples of all weights, 2.00 GB: tp 1.50 GB (0.75 x)" in text
    kept = describe_plan(replace(PLAN, work=replace(work, recomputed_flops=0.0)))
    assert "recomputation" not in kept


def test_the_json_has_the_keys_that_scripts_rely_on() -> None:
    shown = plan_json(PLAN)
    assert list(shown) == [
        "mesh",
        "world_size",
        "micro_batch_size",
        "gradient_accumulation",
        "activation_checkpointing",
        "reshard_after_forward",
        "reduce_gradients",
        "compile",
        "float8",
        "loss_chunks",
        "schedule",
        "methods",
        "profile",
        "software",
        "hosts",
        "placement",
        "ranks",
        "memory",
        "memory_along_pp",
        "time",
        "work",
        "communication",
        "alternatives",
        "comparison",
        "untrainable",
        "prices",
        "rejected",
        "notes",
    ]
    assert shown["mesh"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2}
    assert shown["ranks"][2] == {
        "rank": 2,
        "host": "host-1",
        "local_rank": 0,
        "coords": {"pp": 0, "dp_replicate": 0, "dp_shard": 1, "cp": 0, "tp": 0},
    }
    assert {"peak_bytes", "device_bytes", "worst_rank", "items"} <= set(shown["memory"])
    assert {"step_s", "tokens_per_second_per_device", "mfu"} <= set(shown["time"])
    (sent,) = shown["communication"]
    assert {"axis", "collective", "bytes_per_step", "level", "by_level"} <= set(sent)
    (other,) = shown["alternatives"]
    assert {"mesh", "step_s", "peak_bytes"} <= set(other)
    assert shown["rejected"] == [
        {"family": "tp=4", "constraint": "its groups stay inside a host", "count": 1}
    ]


def test_offloaded_bytes_are_shown_below_the_memory() -> None:
    memory = replace(PLAN.needs, host={"optimizer": 2048, "gradients": 1024})
    text = describe_plan(replace(PLAN, memory=memory))
    assert "  in the host's memory, per rank: optimizer 2 KiB, gradients 1 KiB" in text


def test_bytes_are_shown_by_axis_and_level_if_several_levels_are_crossed() -> None:
    inside = replace(PLAN.communication[0], by_level={"host": 1_500_000_000, "leaf": 0})
    assert "over links" not in describe_plan(replace(PLAN, communication=(inside,)))
    across = replace(inside, axis="dp_shard", by_level={"host": 700_000_000, "leaf": 100_000_000})
    told = describe_plan(replace(PLAN, communication=(inside, across, across)))
    assert (
        """\
  over links of each level, per step, mean of a group's ranks
  axis         host    leaf
  tp        1.50 GB     0 B
  dp_shard  1.40 GB  200 MB
  total     2.90 GB  200 MB
"""
        in told
    )


def test_with_frozen_weights_a_forward_pass_is_not_called_a_third_of_the_work() -> None:
    work = ModelWork(
        parameters=10**9,
        dtype="bfloat16",
        weight_bytes=2 * 10**9,
        flops=4e15,
        recomputed_flops=2e15,
    )
    whole = replace(PLAN, work=work)
    adapted = replace(whole, methods={"adapters": "LoRA of rank 16 on q_proj"})
    assert "more, 50.0% (a whole" in describe_plan(whole)
    text = describe_plan(adapted)
    assert "more, 50.0%" in text
    assert "a whole" not in text
