"""Planning a spec, and refusals with their fixes."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from orchestrator.app.planning.plans import plan_spec, with_prices
from orchestrator.contract.codec import decode, encode
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.plan import Plan
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.contract.spec.model_presets import PRESETS
from orchestrator.errors import PlanError, TrainingError
from orchestrator.inventory.described import hosts_like
from orchestrator.inventory.file import load_inventory
from orchestrator.inventory.hosts import Host, Inventory
from orchestrator.inventory.local import local_inventory
from orchestrator.inventory.profiles import load_profile
from orchestrator.plan.model.families import shape_of
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.planner import plan
from orchestrator.plan.search.admitted import first_mesh, likely_mesh
from orchestrator.plan.search.alternatives import nearest_plans
from orchestrator.plan.search.edits import apply
from orchestrator.plan.search.rule import Hosts, Refusal, Request
from orchestrator.plan.search.rules import refusals
from orchestrator.plan.training import trainer_config
from trainer.model.build import check_model, read_model_config

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = PRESETS["llama-tiny"]
LLAMA_8B = PRESETS["llama3-8b"]
CPU = load_profile("cpu")
H100_HOST = load_inventory("{profile: h100-sxm-80gb, hosts: 1, devices_per_host: 8}", "a test")
GIB = 1 << 30


def job(**changes: Any) -> JobSpec:
    """The quickstart with its outer degrees fixed, with other values at `section__key`."""
    data: dict[str, Any] = {
        "parallel": {"pp": 1, "dp_replicate": 1, "cp": 1},
        "name": "demo",
        "model": {"preset": "llama-tiny"},
        "data": {"files": "*.txt", "sequence_length": 256},
        "train": {"steps": 60, "global_batch_size": 16},
        "cluster": {"hosts": 2, "gpus_per_host": 2},
    }
    for path, value in changes.items():
        section, _, key = path.partition("__")
        data.setdefault(section, {})[key] = value
    return decode(JobSpec, data)


def host(name: str, devices: int) -> Host:
    return Host(name=name, devices=devices, profile=CPU)


def planned(spec: JobSpec, config: Any = TINY, device_bytes: int | None = None) -> Plan:
    return plan(spec, local_inventory(spec.cluster, device_bytes), config)


def refused(spec: JobSpec, config: Any = TINY, inventory: Inventory | None = None) -> PlanError:
    with pytest.raises(PlanError) as caught:
        plan(spec, inventory or local_inventory(spec.cluster), config)
    assert caught.value.fix
    return caught.value


def test_the_quickstart_gets_a_simple_mesh_and_notes_the_choices() -> None:
    found = planned(job(parallel__pp="auto", parallel__dp_replicate="auto", parallel__cp="auto"))
    assert sum(degree > 1 for degree in found.mesh.degrees) == 1
    assert found.hosts == ("host-0", "host-1")
    assert (found.micro_batch_size, found.gradient_accumulation) == (4, 1)
    assert found.activation_checkpointing == "none"
    assert found.notes[0].startswith("chosen for the simplest mesh within ")


@pytest.mark.parametrize(
    ("changes", "mesh"),
    [
        ({"cluster__gpus_per_host": 3, "train__global_batch_size": 12}, Mesh(dp_shard=6)),
        ({"parallel__tp": 2}, Mesh(dp_shard=2, tp=2)),
        ({"cluster__hosts": 1, "cluster__gpus_per_host": 1}, Mesh()),
        ({"parallel__tp": 1}, Mesh(dp_shard=4)),
        ({"data__sequence_length": 255}, Mesh(dp_shard=4)),
        ({"parallel__dp_shard": 4}, Mesh(dp_shard=4)),
        ({"parallel__dp_shard": 1, "parallel__dp_replicate": 2}, Mesh(dp_replicate=2, tp=2)),
        ({"parallel__dp_replicate": 2, "parallel__tp": 1}, Mesh(dp_replicate=2, dp_shard=2)),
        ({"parallel__dp_replicate": 4}, Mesh(dp_replicate=4)),
        ({"train__compile": True}, Mesh(dp_shard=4)),
        ({"parallel__data": "ddp", "parallel__dp_replicate": "auto"}, Mesh(dp_replicate=4)),
    ],
)
def test_auto_degrees_fill_what_the_fixed_degrees_leave(
    changes: dict[str, Any], mesh: Mesh
) -> None:
    assert planned(job(**changes)).mesh == mesh


def test_a_simpler_mesh_than_the_fastest_says_so_and_prices_are_those_of_its_step() -> None:
    inventory = EXAMPLES / "inventories" / "h100.yaml"
    planned = plan_spec(EXAMPLES / "llama3-70b.yaml", (), {}, inventory)
    assert planned.plan.comparison is not None, "another mesh is faster"
    shortest = "the simplest mesh within 5.4% of the shortest step that fits"
    (note,) = (one for one in planned.plan.notes if one.startswith("chosen for"))
    assert note.startswith(f"chosen for {shortest}: pp=1, ")
    priced = with_prices(planned).plan
    assert priced.time is not None
    assert priced.prices
    for one in priced.prices:
        assert one.share == pytest.approx(priced.time.step_s / one.choice.step_s - 1)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"parallel__tp": 4}, "no tensor-parallel group spans hosts", "--set parallel.tp=2  (dp_s"),
    (
        {"cluster__gpus_per_host": 1, "parallel__tp": 2},
        "parallel.tp=2: must be 1, as cluster.gpus_per_host is, so that no tensor-parallel",
        "--set parallel.tp=1",
    ),
    ({"parallel__tp": 3}, "tp=3: must divide the 8 heads [tp-heads]", "--set parallel.tp="),
    (
        {"cluster__gpus_per_host": 8, "parallel__tp": 8},
        "parallel.tp=8: must divide the 4 kv heads [tp-kv-heads]",
        "--set parallel.tp=4",
    ),
    (
        {"parallel__dp_shard": 3, "parallel__tp": 2},
        "parallel: degrees must multiply to the 4 ranks of 2 hosts x 2; pp=1 x dp_replicate=1 x"
        " dp_shard=3 x cp=1 x tp=2 multiply to 6 [world-size]",
        "--set parallel.dp_shard=2",
    ),
    (
        {"parallel__dp_replicate": 3},
        "dp_shard=auto x cp=1 x tp=2 (auto) multiply to a multiple of 6",
        "--set parallel.dp_replicate=2",
    ),
    (
        {"train__global_batch_size": 7},
        "train.global_batch_size=7: the data-parallel ranks must divide the global batch of 7; 2"
        " data-parallel ranks = 2 [batch-ranks]",
        "--set train.global_batch_size=8",
    ),
    (
        {"train__micro_batch_size": 16},
        "2 data-parallel ranks x micro batch 16 = 32 [batch-ranks]",
        "--set train.micro_batch_size=auto",
    ),
    (
        {"data__sequence_length": 255, "parallel__tp": 2},
        "parallel.tp=2: must divide the 255 tokens of a sequence [tp-sequence]",
        "--set parallel.tp=1",
    ),
    (
        {"data__sequence_length": 4096},
        "max_position_embeddings is 2048",
        "--set data.sequence_length=2048",
    ),
    (
        {"parallel__pp": 8, "cluster__hosts": 4, "train__global_batch_size": 64},
        "parallel.pp=8: each stage needs a layer, the model has 4 for 8 stages [pp-layers]",
        "--set parallel.pp=4",
    ),
    (
        {"parallel__pp": 4, "parallel__pipeline": {"schedule": "zbv"}},
        "parallel.pp=4: each stage needs a layer, the model has 4 for 8 stages = 4 x 2 a rank",
        "--set parallel.pipeline.schedule=1f1b",
    ),
    (
        {
            "parallel__pp": 4,
            "parallel__pipeline": {"schedule": "1f1b"},
            "train__micro_batch_size": 8,
        },
        "parallel.pp=4: 1f1b cannot run the micro batches of a global batch of 16; it needs"
        " at least 4, one for each stage, 1 data-parallel ranks x micro batch 8 make 2",
        "--set train.micro_batch_size=auto",
    ),
    (
        {
            "parallel__pp": 4,
            "parallel__pipeline": {"schedule": "1f1b"},
            "train__global_batch_size": 3,
        },
        "it needs at least 4, one for each stage",
        "--set train.global_batch_size=4",
    ),
    (
        {
            "parallel__pp": 2,
            "parallel__pipeline": {"schedule": "interleaved_1f1b"},
            "train__micro_batch_size": 1,
            "train__global_batch_size": 7,
            "parallel__tp": 2,
        },
        "it needs equal parts in its 3 rounds, for example 6, 1 data-parallel ranks x micro batch 1"
        " make 7",
        "--set parallel.pipeline.schedule=1f1b",
    ),
    (
        {"parallel__pp": 2, "parallel__pipeline": {"schedule": "zbv"}, "train__compile": True},
        "train.compile=true: zbv splits the backward pass",
        "--set parallel.pipeline.schedule=1f1b",
    ),
    (
        {
            "parallel__pp": 2,
            "parallel__pipeline": {"schedule": "zbv"},
            "train__activation_checkpointing": "selective",
        },
        "train.activation_checkpointing=selective: zbv runs two backward passes",
        "--set parallel.pipeline.schedule=1f1b",
    ),
    (
        {
            "parallel__pp": 2,
            "parallel__pipeline": {"schedule": "zbv"},
            "train__activation_checkpointing": "elementwise",
        },
        "train.activation_checkpointing=elementwise: zbv runs two backward passes",
        "--set parallel.pipeline.schedule=1f1b",
    ),
    (
        {"parallel__cp": 2, "data__sequence_length": 254},
        "parallel.cp=2: ring splits the 254 tokens of a sequence into 2 x cp equal parts (here 4)",
        "--set parallel.context=ulysses",
    ),
    (
        {"parallel__cp": 2, "data__sequence_length": 255, "parallel__context": "ulysses"},
        "ulysses splits the 255 tokens of a sequence into cp equal parts (here 2)",
        "--set data.sequence_length=254",
    ),
    (
        {"parallel__cp": 3, "cluster__hosts": 3, "parallel__context": "ulysses"},
        "parallel.cp=3: ulysses needs cp to divide the heads of a tp rank",
        "--set parallel.cp=",
    ),
    (
        {"parallel__cp": 2, "parallel__tp": 2, "data__sequence_length": 258},
        "parallel.cp=2: ring splits the 258 tokens",
        "--set data.sequence_length=256",
    ),
    (
        {
            "parallel__cp": 2,
            "parallel__tp": 4,
            "cluster__gpus_per_host": 4,
            "data__sequence_length": 260,
        },
        "parallel.tp=4: must divide the 130 tokens of a cp rank's part",
        "--set parallel.tp=2",
    ),
    (
        {"parallel__data": "ddp", "parallel__tp": 1},
        "dp_shard=1 (auto) x cp=1 x tp=1 multiply to 1 [world-size]",
        "--set parallel.dp_replicate=4",
    ),
    (
        {"parallel__fsdp": {"reshard_after_forward": 3}, "parallel__tp": 1},
        "reshard_after_forward=3 must divide dp_shard x cp = 4 ranks [reshard-group]",
        "--set parallel.fsdp.reshard_after_forward=true",
    ),
    (
        {"model__lora": {"target_modules": ["q_proj", "qproj"]}},
        "must be linear layers of llama (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj,"
        " down_proj), got qproj",
        "--set 'model.lora.target_modules=[q_proj]'",
    ),
]


@pytest.mark.parametrize(("changes", "reason", "way_out"), REFUSED)
def test_an_impossible_spec_is_refused_with_a_reason_and_a_fix(
    changes: dict[str, Any], reason: str, way_out: str
) -> None:
    error = refused(job(**changes))
    assert reason in error.message
    assert way_out in error.fix


def test_all_reasons_are_reported_at_once() -> None:
    error = refused(
        job(
            parallel__pp=5,
            parallel__cp=7,
            parallel__tp=4,
            parallel__dp_shard=3,
            parallel__fsdp={"reshard_after_forward": 2},
            data__sequence_length=9000,
            train__global_batch_size=7,
            model__lora={"target_modules": []},
        )
    )
    begin = [line.strip().split(":")[0] for line in error.message.splitlines()[1:]]
    assert begin == [
        "data.sequence_length=9000",
        "model.lora.target_modules",
        "parallel.tp=4",
        "parallel.cp=7",
        "parallel.fsdp.reshard_after_forward=2",
        "parallel.pp=5",
        "parallel",
        "train.global_batch_size=7",
    ]


def test_byte_tokens_need_a_vocabulary_of_256_at_least() -> None:
    error = refused(job(), {**TINY, "vocab_size": 128})
    assert "needs a vocabulary of 256 or more, the model's vocab_size is 128" in error.message
    assert "--set model.config.vocab_size=256" in error.fix


def test_too_few_hosts_are_refused_with_the_number_in_the_inventory() -> None:
    error = refused(job(cluster__hosts=3), inventory=local_inventory(job().cluster))
    assert "cluster.hosts=3: the inventory has 2" in error.message
    assert "--set cluster.hosts=2" in error.fix


def test_hosts_that_are_not_free_are_named() -> None:
    drained = replace(host("b", 4), state="drained", reason="drained: ECC errors")
    inventory = Inventory(hosts=(host("a", 4), drained))
    error = refused(job(), inventory=inventory)
    assert "cluster.hosts=2: only 1 can be used (b is drained (drained: ECC" in error.message
    assert "--set cluster.hosts=1" in error.fix


def test_hosts_with_too_few_devices_are_named() -> None:
    inventory = Inventory(hosts=(host("a", 4), *(host(f"b{i}", 2) for i in range(6))))
    error = refused(job(cluster__gpus_per_host=4), inventory=inventory)
    assert "only 1 of the 2 hosts that are needed" in error.message
    assert "(b0 has 2, b1 has 2, b2 has 2, b3 has 2 and 2 more have too few)" in error.message
    assert "--set cluster.gpus_per_host=2" in error.fix
    assert "--set cluster.hosts=1" in error.fix


def test_the_fix_for_an_empty_inventory_is_to_add_hosts() -> None:
    assert "add hosts" in refused(job(), inventory=Inventory(hosts=())).fix


def test_hosts_that_lack_a_device_are_skipped() -> None:
    inventory = Inventory(hosts=tuple(host(f"n{i}", 1 if i == 2 else 2) for i in (10, 1, 2)))
    assert plan(job(), inventory, TINY).hosts == ("n1", "n10")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "mamba2"}, "model_type 'mamba2' cannot be planned"),
        ({"model_type": "lama"}, "model_type 'lama' is not one of the"),
        ({}, "model_type, the family of the model, is missing"),
        ({**TINY, "hidden_size": "128"}, "hidden_size must be a whole number, at least 1"),
        ({**TINY, "num_hidden_layers": 0}, "num_hidden_layers must be a whole number"),
        ({**TINY, "attention_bias": 1}, "attention_bias must be true or false"),
        ({**TINY, "attention_dropout": "no"}, "attention_dropout must be a number"),
        ({"model_type": "gpt2", "n_embd": 100}, "n_head=12 must divide n_embd=100"),
        ({"model_type": "gpt2", "hidden_size": 100}, "n_head=12 must divide n_embd=100"),
        ({**TINY, "model_type": "mistral", "sliding_window": 0}, "sliding_window must be a whole"),
        ({**TINY, "num_key_value_heads": 3}, "num_key_value_heads=3 must divide"),
        ({**TINY, "hidden_size": 132}, "num_attention_heads=8 must divide hidden_size=132"),
    ],
)
def test_an_impossible_model_is_refused(config: dict[str, Any], reason: str) -> None:
    assert reason in refused(job(), config).message


def test_a_misspelt_key_of_the_config_is_noted() -> None:
    config = {**TINY, "hiden_size": 64, "torch_dtype": "float32"}
    del config["hidden_size"]
    notes = planned(job(), config).notes
    assert [note for note in notes if "hiden_size" in note] == [
        "the model's config has the unknown key hiden_size; did you mean hidden_size?"
    ]
    assert not any("torch_dtype" in note for note in notes)


def test_activations_of_cpu_ranks_stay_within_their_limit() -> None:
    found = planned(job(train__global_batch_size=4096))
    assert found.needs.items["activations"] + found.needs.items["logits"] <= 256 << 20


@pytest.mark.parametrize("kind", ["none", "elementwise", "selective", "full"])
def test_auto_checkpointing_recomputes_no_more_than_needed(kind: str) -> None:
    changes = {
        "parallel__tp": 1,
        "parallel__fsdp": {"reshard_after_forward": True},
        "train__global_batch_size": 32,
        "train__micro_batch_size": 8,
    }
    peak = planned(job(train__activation_checkpointing=kind, **changes)).needs.peak_bytes
    found = planned(job(**changes), device_bytes=peak)
    assert found.activation_checkpointing == kind
    assert f"activation_checkpointing={kind}" in found.notes[0]


def test_selective_checkpointing_is_not_chosen_where_backward_is_split() -> None:
    """For every device size: if `none` does not fit, the choice is `full`."""
    spec = job(
        parallel__pp=2,
        parallel__tp=1,
        parallel__pipeline={"schedule": "zbv"},
        train__micro_batch_size=4,
    )
    least = planned(
        job(
            parallel__pp=2,
            parallel__tp=1,
            parallel__pipeline={"schedule": "zbv"},
            train__micro_batch_size=4,
            train__activation_checkpointing="full",
        )
    ).needs.peak_bytes
    kinds = {
        planned(spec, device_bytes=least + (size << 20)).activation_checkpointing
        for size in range(0, 99, 3)
    }
    assert kinds == {"none", "full"}


def test_a_job_that_does_not_fit_is_refused_with_changes_that_would_fit() -> None:
    """The devices are just large enough for the smallest plan, but the micro batch is too large."""
    limit = planned(
        job(train__micro_batch_size=1, train__activation_checkpointing="full", cluster__hosts=1)
    ).needs.peak_bytes
    with pytest.raises(PlanError) as caught:
        planned(
            job(
                train__micro_batch_size=8, train__activation_checkpointing="none", cluster__hosts=1
            ),
            device_bytes=limit,
        )
    assert "memory: the smallest plan needs" in caught.value.message
    assert "the smallest changes that fit" in caught.value.fix


def test_missing_spares_are_noted() -> None:
    notes = plan(job(cluster__spare_hosts=2), local_inventory(job().cluster), TINY).notes
    assert "2 spare hosts requested, 0 available" in notes


def test_the_trainers_configuration_has_no_auto_except_formats() -> None:
    spec = job(train__activation_checkpointing="auto")
    found = planned(spec)
    config = trainer_config(spec, found, TINY, "out")
    assert config.model.config == TINY
    assert config.train.activation_checkpointing == "none"
    assert config.train.micro_batch_size == config.micro_batch_size == found.micro_batch_size
    assert config.gradient_accumulation == found.gradient_accumulation
    assert decode(TrainingConfig, encode(config)) == config
    values = encode(config)
    # What depends on the device or the micro batch is decided by the trainer.
    decided_there = ("dtype", "loss_chunks", "run_ahead")
    assert {values["train"].pop(key) for key in decided_there} == {"auto"}
    assert values["data"].pop("format") == values["parallel"]["fsdp"].pop("wrap") == "auto"
    assert values["checkpoint"]["memory"].pop("every") == "auto", "ranks know the hosts' memory"
    assert "auto" not in str(values)


def test_the_trainers_configuration_has_every_method() -> None:
    spec = job(
        parallel__data="zero1",
        parallel__context="ulysses",
        parallel__pipeline={"schedule": "zbv"},
        parallel__pp=2,
        parallel__cp=2,
        parallel__tp=1,
        model__lora={"rank": 4, "target_modules": ["q_proj"]},
        model__weights="models/llama",
        data__validation={"fraction": 0.1},
        train__eval_every=10,
        train__profile={"at_step": 3},
        train__z_loss=1e-4,
        checkpoint__keep_every=100,
    )
    config = trainer_config(spec, planned(spec), TINY, "out")
    assert config.parallel.pipeline.stages_per_rank == 2
    assert encode(config.data) == encode(spec.data) | {"document_mask": False}
    kept = (config.checkpoint, config.model.lora, config.model.weights)
    assert kept == (spec.checkpoint, spec.model.lora, spec.model.weights)
    decided: dict[str, Any] = {"micro_batch_size": config.micro_batch_size}
    decided["activation_checkpointing"] = "none"
    assert encode(config.train) == encode(spec.train) | decided
    degrees = {"dp_shard": 1, "pipeline": {"schedule": "zbv", "stages_per_rank": 2}}
    assert encode(config.parallel) == encode(spec.parallel) | degrees


def test_a_plan_read_from_its_file_is_equal() -> None:
    assert decode(Plan, encode(planned(job()))) == planned(job())


degrees = st.integers(1, 6)
jobs = st.builds(
    job,
    cluster__hosts=st.integers(1, 6),
    cluster__gpus_per_host=st.integers(1, 8),
    parallel__tp=degrees | st.just("auto"),
    parallel__dp_shard=degrees | st.just("auto"),
    parallel__dp_replicate=st.integers(1, 4),
    parallel__pp=st.sampled_from([1, 1, 1, 2, 3, 4]),
    parallel__cp=st.sampled_from([1, 1, 1, 2, 3, 4]),
    parallel__context=st.sampled_from(["ring", "ulysses", "all_gather"]),
    parallel__pipeline=st.fixed_dictionaries(
        {"schedule": st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zbv"])}
    ),
    train__global_batch_size=st.integers(1, 16).map(lambda n: 4 * n),
    train__micro_batch_size=st.sampled_from([1, 2, 4, "auto"]),
    data__sequence_length=st.sampled_from([256, 4096]),
)
inventories = st.lists(st.integers(1, 8), min_size=1, max_size=8).map(
    lambda sizes: Inventory(hosts=tuple(host(f"host-{i}", size) for i, size in enumerate(sizes)))
)


def refused_meshes(spec: JobSpec, inventory: Inventory, shape: ModelShape) -> tuple[Refusal, ...]:
    request = Request(spec, shape, Hosts.of(spec, inventory))
    return refusals(request, first_mesh(request) or likely_mesh(request))


@settings(deadline=None, max_examples=25)
@given(jobs, inventories)
def test_a_plan_fills_the_world_and_keeps_the_batch(spec: JobSpec, inventory: Inventory) -> None:
    shape = shape_of(TINY)
    if refused_meshes(spec, inventory, shape):
        offers = nearest_plans(spec, inventory, shape)
        spec = apply(spec, offers[0].edits) if offers else job()
    if len(inventory.with_devices(spec.cluster.gpus_per_host)) < spec.cluster.hosts:
        inventory = local_inventory(spec.cluster)
    found = plan(spec, inventory, TINY)
    mesh = found.mesh
    assert found.micro_batch_size is not None
    assert found.gradient_accumulation is not None
    per_pass = mesh.data_parallel * found.micro_batch_size
    assert mesh.world_size == len(found.hosts) * found.ranks_per_host
    assert per_pass * found.gradient_accumulation == spec.train.global_batch_size
    assert found.ranks_per_host % mesh.tp == 0
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        asked = getattr(spec.parallel, axis)
        assert asked in ("auto", getattr(mesh, axis))


def test_a_refusal_offers_no_plan_that_does_not_fit_in_memory() -> None:
    """The rules allow tp=1 too, but DDP of 8B then needs 128 GB for its states alone."""
    spec = job(
        parallel__tp=3,
        parallel__data="ddp",
        parallel__dp_replicate="auto",
        cluster__hosts=1,
        cluster__gpus_per_host=4,
    )
    offers = nearest_plans(spec, H100_HOST, shape_of(LLAMA_8B))
    assert [offer.edits for offer in offers] == [{"parallel.tp": 4}, {"parallel.tp": 2}]
    for offer in offers:
        assert plan(apply(spec, offer.edits), H100_HOST, LLAMA_8B).mesh == offer.mesh


def test_a_refusal_says_if_what_the_rules_allow_does_not_fit_in_memory() -> None:
    config = {**LLAMA_8B, "num_hidden_layers": 320}
    spec = job(parallel__tp=3, cluster__hosts=1, cluster__gpus_per_host=8)
    fix = refused(spec, config, H100_HOST).fix or ""
    first, *offers = fix.splitlines()
    assert first == "these pass all rules, but need more memory than a device has:"
    assert "--set parallel.tp=4" in offers[0]
    # A single one must not look like a fix either.
    one = job(parallel__tp=2, cluster__hosts=1, cluster__gpus_per_host=1)
    fix = refused(one, config, H100_HOST).fix or ""
    assert fix.splitlines()[0] == first


def test_a_model_too_large_for_cpus_is_told_how_to_plan_for_gpus() -> None:
    spec = job(cluster__hosts=1, cluster__gpus_per_host=1)
    for hosts, told in ((local_inventory(spec.cluster), True), (H100_HOST, False)):
        refusal = refused(spec, LLAMA_8B, hosts)
        assert ("--set cluster.gpu=h100-sxm-80gb" in (refusal.fix or "")) is told


@settings(deadline=None, max_examples=30)
@given(jobs, inventories)
def test_an_offered_plan_can_be_planned(spec: JobSpec, inventory: Inventory) -> None:
    for offer in nearest_plans(spec, inventory, shape_of(TINY)):
        changed = apply(spec, offer.edits)
        assert plan(changed, inventory, TINY).world_size == offer.mesh.world_size
        fixed = apply(changed, {f"parallel.{a}": d for a, d in asdict(offer.mesh).items()})
        assert plan(fixed, inventory, TINY).mesh == offer.mesh


def test_an_odd_vocabulary_is_padded_for_tp() -> None:
    odd = {**TINY, "vocab_size": 257}
    spec = job(parallel__tp=2)
    with pytest.raises(PlanError) as caught:
        plan(spec, local_inventory(spec.cluster), odd)
    assert "must divide the 257 vocabulary entries" in caught.value.message
    pad, without = nearest_plans(spec, local_inventory(spec.cluster), shape_of(odd))
    assert dict(pad.edits) == {"model.pad_vocab_to_multiple_of": 128}
    assert dict(without.edits) == {"parallel.tp": 1}
    assert str(pad) in (caught.value.fix or "")
    padded = apply(spec, pad.edits)
    found = plan(padded, local_inventory(spec.cluster), {**odd, "vocab_size": 384})
    assert found.mesh.tp == 2


@settings(deadline=None, max_examples=25)
@given(jobs)
def test_a_refusal_on_enough_hosts_always_offers_a_plan(spec: JobSpec) -> None:
    inventory, shape = local_inventory(spec.cluster), shape_of(TINY)
    if refused_meshes(spec, inventory, shape):
        fix = refused(spec).fix
        offers = nearest_plans(spec, inventory, shape)
        assert offers
        assert all(str(offer) in fix for offer in offers)


def test_a_pipeline_with_a_large_bubble_has_a_note() -> None:
    wish = {"schedule": "1f1b"}
    few = job(parallel__pp=2, parallel__tp=2, parallel__pipeline=wish, train__global_batch_size=2)
    found = planned(few)
    assert found.time is not None
    share = f"bubble {found.time.bubble:.1%} of the step"
    assert f"{share} (33.3% if it were equal passes alone)" in found.methods["pipeline"]
    assert any(f"pipeline {share.replace(' ', ' is ', 1)}" in note for note in found.notes)
    many = apply(few, {"train.global_batch_size": 16, "train.micro_batch_size": 1})
    assert not any("bubble" in note for note in planned(many).notes)


def test_devices_without_a_rank_are_named() -> None:
    hosts = Inventory(hosts=(host("a", 8), host("b", 8), host("c", 6)))
    found = plan(
        job(cluster__hosts=3, cluster__gpus_per_host=6, train__global_batch_size=18), hosts, TINY
    )
    (note,) = (note for note in found.notes if "idle" in note)
    assert note == "cluster.gpus_per_host=6: 4 devices stay idle, 2 on each of a, b"
    alike = plan(job(cluster__hosts=2, cluster__gpus_per_host=8), hosts, TINY)
    assert not any("idle" in note for note in alike.notes)


def test_one_device_of_a_board_is_noted() -> None:
    noted = "cluster.gpus_per_host=1: ranks use one h100-sxm-80gb of each host"
    for gpu, per_host, said in (("h100-sxm-80gb", 1, 1), ("h100-sxm-80gb", 2, 0), ("cpu", 1, 0)):
        inventory = hosts_like(job(cluster__gpus_per_host=per_host).cluster, load_profile(gpu))
        notes = plan(job(cluster__gpus_per_host=per_host), inventory, TINY).notes
        assert sum(note.startswith(noted) for note in notes) == said


def test_hosts_without_a_price_are_named_if_others_have_one() -> None:
    priced = [replace(host(name, 2), price_per_gpu_hour=2.0) for name in ("a", "b")]
    spec = job(cluster__hosts=3, cluster__gpus_per_host=2, train__global_batch_size=12)
    found = plan(spec, Inventory(hosts=(*priced, host("c", 2))), TINY)
    (note,) = (note for note in found.notes if "price" in note)
    assert note.startswith("money is unknown: c has no price (price_per_gpu_hour")
    bare = plan(spec, Inventory(hosts=tuple(host(name, 2) for name in "abc")), TINY)
    assert not any("price" in note for note in bare.notes), "no price is no mistake"


def test_an_auto_micro_batch_fits_the_schedule() -> None:
    wish = {"schedule": "interleaved_1f1b"}
    found = planned(job(parallel__pp=2, parallel__pipeline=wish, train__global_batch_size=15))
    # 15 micro batches would need 7 rounds and 5 would need 2, which do not divide them.
    assert found.gradient_accumulation in (1, 3)


def test_methods_are_named_only_for_axes_in_use() -> None:
    assert planned(job(cluster__hosts=1, cluster__gpus_per_host=1)).methods == {}
    found = planned(
        job(
            parallel__pp=2,
            parallel__cp=2,
            parallel__tp=2,
            cluster__hosts=4,
            parallel__context="all_gather",
            parallel__pipeline={"schedule": "gpipe"},
            model__lora={"rank": 4, "target_modules": ["q_proj"], "quantize": "nf4"},
        )
    )
    assert found.mesh == Mesh(pp=2, cp=2, tp=2)
    assert found.methods["context"] == "all_gather"
    assert found.methods["pipeline"].startswith(
        f"gpipe, 1 stage per rank, {found.gradient_accumulation} micro batches, bubble"
    )
    assert found.methods["adapters"] == "LoRA of rank 4 on q_proj, frozen weights in nf4"


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (
            {"fsdp": {"reshard_after_forward": True}},
            "fsdp: weights gathered layer by layer (ZeRO-3)",
        ),
        (
            {"dp_replicate": 2, "fsdp": {"reshard_after_forward": True}},
            "hsdp: weights gathered layer by layer (ZeRO-3)",
        ),
        ({"data": "ddp", "dp_replicate": 4}, "ddp: everything replicated"),
        (
            {"dp_replicate": 4, "dp_shard": 1},
            "hsdp: everything replicated, gradients averaged layer by layer",
        ),
        (
            {"data": "zero1", "dp_replicate": 4},
            "zero1: everything replicated except optimizer state",
        ),
        (
            {"fsdp": {"reshard_after_forward": False}},
            "fsdp: weights stay gathered from forward to backward (ZeRO-2)",
        ),
        (
            {"fsdp": {"reshard_after_forward": 2, "cpu_offload": True}},
            "fsdp: weights sharded over 2 ranks from forward to backward, offloaded to the host's",
        ),
    ],
)
def test_the_strategy_of_the_data_axis_is_named(wish: dict[str, Any], said: str) -> None:
    sets = {f"parallel__{key}": value for key, value in wish.items()}
    assert planned(job(parallel__tp=1, **sets)).methods["data"].startswith(said)


def test_axes_whose_groups_span_hosts_are_noted() -> None:
    inside = planned(job(parallel__cp=2, parallel__tp=1))
    assert not any("hosts" in note for note in inside.notes)
    across = planned(job(parallel__cp=2, parallel__tp=2))
    assert any(note.startswith("cp=2: groups span hosts") for note in across.notes)
    staged = planned(job(parallel__pp=2))
    assert any(note.startswith("pp=2: stages are on different hosts") for note in staged.notes)
    alone = planned(job(parallel__pp=2, cluster__hosts=1))
    assert not any("different hosts" in note for note in alone.notes)


def test_a_custom_tokenizer_is_not_checked_and_gets_a_note() -> None:
    spec = job(data__tokenizer="models/llama")
    assert any(
        "the trainer checks at start" in n for n in planned(spec, {**TINY, "vocab_size": 64}).notes
    )


GPT2 = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 64, "n_layer": 4, "n_head": 4}


def test_a_model_with_fused_projections_never_uses_tensor_parallel() -> None:
    assert planned(job(), GPT2).mesh == Mesh(dp_shard=4)
    error = refused(job(parallel__tp=2), GPT2)
    assert "the fused projections of gpt2 cannot be sharded" in error.message
    assert "--set parallel.tp=1" in error.fix


def test_dropout_inside_attention_rules_out_context_parallel() -> None:
    assert (
        "no dropout, but the model's config sets 0.1 [cp-dropout]"
        in refused(job(parallel__cp=2), GPT2).message
    )
    assert planned(job(parallel__cp=2), {**GPT2, "attn_pdrop": 0.0}).mesh == Mesh(dp_shard=2, cp=2)


def test_dropout_inside_attention_rules_out_document_masks() -> None:
    error = refused(job(data__document_mask=True), GPT2)
    assert "has no dropout, but the model's config sets 0.1 [mask-dropout]" in error.message
    assert planned(job(data__document_mask=True), {**GPT2, "attn_pdrop": 0.0})


def test_adapter_targets_are_checked_against_the_model_family() -> None:
    error = refused(job(model__lora={}), GPT2)
    assert "linear layers of gpt2 (c_attn, c_proj, c_fc), got q_proj" in error.message
    assert "--set 'model.lora.target_modules=[c_attn]'" in error.fix


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        {**TINY, "sliding_window": 128},
        {**TINY, "model_type": "mistral"},
        {**TINY, "model_type": "mistral", "sliding_window": 128},
        {**TINY, "model_type": "mistral", "sliding_window": None},
        {**TINY, "model_type": "qwen2"},
        {**TINY, "model_type": "qwen2", "sliding_window": 128},
        {**TINY, "model_type": "qwen2", "use_sliding_window": True},
        {**TINY, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 128},
        {**TINY, "model_type": "qwen2", "layer_types": ["sliding_attention"] * 4},
        {**TINY, "model_type": "qwen3", "layer_types": ["full_attention"] * 4},
        {**TINY, "model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 2},
        GPT2,
        {**GPT2, "n_positions": 128},
    ],
)
@pytest.mark.parametrize("length", [128, 1024, 8192])
def test_the_planner_refuses_the_models_that_the_trainer_refuses(
    config: dict[str, Any], length: int
) -> None:
    spec = job(
        data__sequence_length=length, parallel__tp=1, model__preset=None, model__config=config
    )
    try:
        check_model(read_model_config(spec.model), 256, length)
    except TrainingError:
        refused(spec, config)
    else:
        planned(spec, config)


def test_auto_computes_in_bfloat16_on_a_gpu_and_in_float32_on_a_cpu() -> None:
    for profile, dtype in (("h100-sxm-80gb", "bfloat16"), ("cpu", "float32")):
        inventory = Inventory(
            hosts=tuple(
                Host(name=f"host-{number}", devices=2, profile=load_profile(profile))
                for number in range(2)
            )
        )
        auto = plan(job(), inventory, TINY)
        asked = plan(job(train__dtype=dtype), inventory, TINY)
        assert (auto.mesh, auto.memory, auto.time) == (asked.mesh, asked.memory, asked.time)
        notes = [note for note in auto.notes if "train.dtype=auto" in note]
        assert bool(notes) == (dtype == "bfloat16")
        assert not [note for note in asked.notes if "train.dtype" in note]
        repeated = plan(job(train__deterministic=True), inventory, TINY)
        slower = [note for note in repeated.notes if "train.deterministic=true" in note]
        assert bool(slower) == (dtype == "bfloat16")
        config = trainer_config(job(), auto, TINY, "/run")
        assert config.train.dtype == "auto", "the trainer decides by its own device"


def test_float8_needs_a_device_and_a_compiler_for_it() -> None:
    spec = job(train__float8=True)
    error = refused(spec)
    assert "[float8-compile]" in error.message
    assert "needs devices with float8 arithmetic, and cpu has none" in error.message
    a100 = Host(name="a", devices=4, profile=load_profile("a100-sxm-80gb"))
    h100 = Host(name="a", devices=4, profile=load_profile("h100-sxm-80gb"))
    compiled = job(train__float8=True, train__compile=True, cluster__hosts=1)
    compiled = replace(compiled, cluster=replace(compiled.cluster, gpus_per_host=4))
    assert "[float8-device]" in refused(compiled, inventory=Inventory(hosts=(a100,))).message
    assert plan(compiled, Inventory(hosts=(h100,)), TINY).mesh.tp == 1
