"""The planner refuses exactly the jobs that the trainer would refuse after the start of ranks."""

from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from orchestrator.contract.codec import Invalid, decode
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.contract.spec.model_presets import PRESETS
from orchestrator.errors import PlanError, TrainingError
from orchestrator.inventory.local import local_inventory
from orchestrator.plan.model.families import shape_of
from orchestrator.plan.planner import plan
from orchestrator.plan.stages import stage_ranks
from trainer.config import complete
from trainer.model.build import check_model, read_model_config
from trainer.parallel.context import check_context_parallel
from trainer.parallel.stages import slices_of_rank
from trainer.parallel.tensor import check_tensor_parallel

LLAMA = {**PRESETS["llama-tiny"], "num_hidden_layers": 6, "max_position_embeddings": 512}
MODELS: list[dict[str, Any]] = [
    LLAMA,
    {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 1},
    {**LLAMA, "model_type": "mistral", "sliding_window": 128},
    {**LLAMA, "model_type": "qwen2", "intermediate_size": 354},
    {"model_type": "gpt2", "vocab_size": 256, "n_embd": 64, "n_layer": 4, "n_head": 4},
    {**PRESETS["qwen3-tiny"], "vocab_size": 258},
]
MODELS.append({**MODELS[4], "attn_pdrop": 0.0})

degrees = st.sampled_from([1, 1, 2, 2, 3, 4])
pipelines = st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zbv"])
splits = st.fixed_dictionaries(
    {
        "pp": degrees,
        "dp_replicate": degrees,
        "cp": degrees,
        "tp": degrees,
        "context": st.sampled_from(["ring", "ulysses", "all_gather"]),
        "pipeline": pipelines.map(lambda schedule: {"schedule": schedule}),
    }
)
shardings = st.fixed_dictionaries(
    {
        "data": st.just("fsdp"),
        "dp_shard": degrees,
        "fsdp": st.sampled_from([{}, {"reshard_after_forward": 2}]),
    }
) | st.sampled_from(["ddp", "zero1"]).map(lambda data: {"data": data, "dp_shard": 1})
jobs = st.fixed_dictionaries(
    {
        "model": st.sampled_from(MODELS),
        "parallel": st.tuples(splits, shardings).map(lambda parts: parts[0] | parts[1]),
        "sequence_length": st.sampled_from([48, 60, 128, 256, 510, 1024]),
        "micro": st.sampled_from([1, 2, 4]),
        "passes": st.integers(1, 9),
        "extra": st.sampled_from([0, 0, 0, 1]),
        "compile": st.sampled_from([False, "auto", True]),
        "activation_checkpointing": st.sampled_from(
            ["none", "elementwise", "selective", "full", "every_k"]
        ),
    }
)


def parts_of(wish: dict[str, Any]) -> dict[str, Any]:
    split = wish["parallel"]
    batch = split["dp_replicate"] * split["dp_shard"] * wish["micro"] * wish["passes"]
    return {
        "model": {"config": wish["model"]},
        "data": {"files": "*.txt", "sequence_length": wish["sequence_length"]},
        "train": {
            "steps": 1,
            "global_batch_size": batch + wish["extra"] * wish["micro"],
            "compile": wish["compile"],
            "activation_checkpointing": wish["activation_checkpointing"],
        },
        "parallel": split,
    }


def world_of(split: dict[str, Any]) -> int:
    world: int = split["pp"] * split["dp_replicate"] * split["dp_shard"] * split["cp"] * split["tp"]
    return world


def refused_by_trainer(config: TrainingConfig, world: int) -> str:
    """The refusal that `trainer.main` prints; empty if it refuses nothing."""
    try:
        config = complete(config, world)
        values, mesh = read_model_config(config.model), config.mesh
        length = config.data.sequence_length
        check_model(values, 256, length)
        check_context_parallel(values, config.parallel.context, mesh, length)
        if mesh.tp > 1:
            check_tensor_parallel(values, mesh.tp, length // mesh.cp)
        for rank in range(mesh.pp):
            slices_of_rank(values, config.parallel.pipeline, mesh.pp, rank, length)
    except TrainingError as exc:
        return str(exc)
    return ""


def refused_by_planner(spec: JobSpec, model: dict[str, Any]) -> str:
    try:
        plan(spec, local_inventory(spec.cluster), model)
    except PlanError as exc:
        return exc.message
    return ""


@settings(deadline=None, max_examples=50)
@given(jobs)
def test_planner_and_trainer_refuse_the_same(wish: dict[str, Any]) -> None:
    """On one host, because the trainer does not refuse a tensor-parallel group across hosts."""
    parts, world = parts_of(wish), world_of(wish["parallel"])
    parts["train"]["micro_batch_size"] = wish["micro"]
    job = {"name": "a", "cluster": {"hosts": 1, "gpus_per_host": world}}
    rest = {"micro_batch_size": wish["micro"], "out": "run"}
    try:
        spec: JobSpec = decode(JobSpec, parts | job)
    except Invalid:
        return  # A batch that its micro batch does not divide.
    reasons = refused_by_planner(spec, wish["model"])
    try:
        config: TrainingConfig = decode(TrainingConfig, parts | rest)
    except Invalid:
        event("the trainer's configuration cannot be")
        assert reasons
        return
    event("refused" if reasons else "planned")
    assert bool(refused_by_trainer(config, world)) == bool(reasons), reasons


def test_stages_have_the_layers_that_the_trainer_gives_them() -> None:
    values = {**LLAMA, "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
    values |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    spec: JobSpec = decode(
        JobSpec,
        {
            "name": "a",
            "model": {"config": values},
            "data": {"files": "x", "sequence_length": 8192},
            "train": {"steps": 1, "global_batch_size": 64},
        },
    )
    pipeline, shape = spec.parallel.pipeline, shape_of(values)
    config = read_model_config(spec.model)
    for pp in (2, 4, 8):
        parts = [slices_of_rank(config, pipeline, pp, rank, 8192) for rank in range(pp)]
        trained = [sum(part.stop - part.first for part in of_rank) for of_rank in parts]
        assert [rank.layers for rank in stage_ranks(shape, pp, pipeline, 8, 8192)] == trained
