"""Which meshes a job can run on: one table of rules.

The search prunes meshes with this table, and the refusal of a spec lists the broken rules from it,
so both always agree. The table has the checks that the trainer makes when its ranks start, so that
a job is refused before it is queued. Memory is not a rule, because the search computes it for each
mesh. Only the trainer can check tokenizers, weights and GPUs.

To add a rule, write its check in `rule_checks.py` and add it to `RULES`. The search counts a mesh
under the first rule that it breaks, so the order decides what `ndctl plan` lists.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Literal

from msgspec.structs import replace

from orchestrator.contract.codec import Invalid
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.search import rule_checks as checks
from orchestrator.plan.search.rule import Broken, Case, Refusal, Request, Rule, refusal_of

HOST_FIX = "free or add hosts, or ask for fewer"
TP_FIX = "set parallel.tp=auto, or a degree that divides"
VOCABULARY_FIX = f"{TP_FIX}, or pad the vocabulary (--set model.pad_vocab_to_multiple_of=128)"
FULL_FIX = "set data.sequence_length to at most that, or use another model"
SCHEDULE_FIX = "set parallel.pipeline.schedule=auto"
Check = Callable[[Case], Broken | None]


def _of_job(name: str, reads: tuple[str, ...], check: Check, fix: str) -> Rule:
    return Rule(name=name, scope="job", reads=reads, check=check, fix=fix)


def _of_mesh(name: str, axis: str, reads: tuple[str, ...], check: Check, fix: str) -> Rule:
    return Rule(name=name, scope="mesh", axis=axis, reads=reads, check=check, fix=fix)


def _of_schedule(name: str, reads: tuple[str, ...], check: Check, fix: str) -> Rule:
    return Rule(name=name, scope="schedule", axis="pp", reads=reads, check=check, fix=fix)


def _tp_divides(name: str, what: str, size: Callable[[ModelShape], int], fix: str = TP_FIX) -> Rule:
    return _of_mesh(name, "tp", ("parallel.tp",), checks.divides(what, size), fix)


RULES: tuple[Rule, ...] = (
    # name, axis of a mesh, keys that it reads, check, fix
    _of_job("hosts-in-inventory", ("cluster.hosts",), checks.too_few_hosts, HOST_FIX),
    _of_job(
        "devices-per-host",
        ("cluster.gpus_per_host", "cluster.hosts"),
        checks.too_few_devices,
        HOST_FIX,
    ),
    _of_job(
        "hosts-usable", ("cluster.hosts", "cluster.gpus_per_host"), checks.unusable_hosts, HOST_FIX
    ),
    _of_job(
        "byte-vocabulary",
        ("data.tokenizer",),
        checks.small_vocabulary,
        f"use a model with a vocab_size of {checks.BYTE_TOKENS} or more"
        f" (--set model.config.vocab_size={checks.BYTE_TOKENS} where the config is inline)",
    ),
    _of_job("sequence-positions", ("data.sequence_length",), checks.long_sequence, FULL_FIX),
    _of_job("sequence-window", ("data.sequence_length",), checks.sliding_window, FULL_FIX),
    _of_job(
        "full-attention",
        ("model",),
        checks.other_layer_types,
        "use a model whose layers are all full_attention",
    ),
    _of_job(
        "mask-dropout",
        ("data.document_mask",),
        checks.dropout_inside_documents,
        "set attention dropout to 0 in the model's config, or data.document_mask=false",
    ),
    _of_job(
        "lora-modules",
        ("model.lora.target_modules",),
        checks.unknown_modules,
        "name linear layers of the model in model.lora.target_modules",
    ),
    _of_mesh(
        "tp-near",
        "tp",
        ("parallel.tp", "cluster.gpus_per_host", "cluster.hosts"),
        checks.distant_group,
        TP_FIX,
    ),
    _of_mesh("tp-fused", "tp", ("parallel.tp",), checks.fused_projections, "set parallel.tp=1"),
    _tp_divides("tp-heads", "heads", lambda shape: shape.num_heads),
    _tp_divides("tp-kv-heads", "kv heads", lambda shape: shape.num_kv_heads),
    _tp_divides(
        "tp-vocabulary", "vocabulary entries", lambda shape: shape.vocab_size, VOCABULARY_FIX
    ),
    _tp_divides("tp-intermediate", "intermediate columns", lambda shape: shape.intermediate_size),
    _of_mesh(
        "tp-sequence",
        "tp",
        ("parallel.tp", "parallel.cp", "data.sequence_length"),
        checks.uneven_tokens,
        TP_FIX,
    ),
    _of_mesh(
        "cp-sequence",
        "cp",
        ("parallel.cp", "parallel.context", "data.sequence_length"),
        checks.uneven_sequence,
        "change data.sequence_length or parallel.cp",
    ),
    _of_mesh(
        "cp-heads",
        "cp",
        ("parallel.cp", "parallel.tp", "parallel.context"),
        checks.uneven_heads,
        "set parallel.context=ring or all_gather, or change parallel.cp",
    ),
    _of_mesh(
        "cp-dropout",
        "cp",
        ("parallel.cp",),
        checks.attention_dropout,
        "set parallel.cp=1, or attention dropout to 0 in the model's config",
    ),
    _of_mesh(
        "reshard-group",
        "dp_shard",
        ("parallel.fsdp.reshard_after_forward", "parallel.dp_shard", "parallel.cp"),
        checks.uneven_reshard,
        "set parallel.fsdp.reshard_after_forward=auto",
    ),
    _of_schedule(
        "pp-layers",
        ("parallel.pp", "parallel.pipeline.schedule", "parallel.pipeline.stages_per_rank"),
        checks.few_layers,
        "set parallel.pp=auto, or fewer stages per rank",
    ),
    _of_schedule(
        "zbv-selective",
        ("train.activation_checkpointing", "parallel.pipeline.schedule", "parallel.pp"),
        checks.split_selective,
        SCHEDULE_FIX,
    ),
    _of_schedule(
        "zbv-compile",
        ("train.compile", "parallel.pipeline.schedule", "parallel.pp"),
        checks.split_compiled,
        SCHEDULE_FIX,
    ),
    _of_job(
        "float8-compile",
        ("train.float8", "train.compile"),
        checks.uncompiled_float8,
        "set train.compile=true, or train.float8=false",
    ),
    _of_job("float8-device", ("train.float8",), checks.float8_device, "set train.float8=false"),
    _of_job(
        "float8-adapters",
        ("train.float8", "model.lora"),
        checks.float8_adapters,
        "set train.float8=false",
    ),
    _of_mesh(
        "float8-sides",
        "tp",
        ("train.float8", "parallel.tp"),
        checks.float8_sides,
        "set train.float8=false",
    ),
    _of_mesh(
        "world-size",
        "degrees",
        ("parallel", "cluster.hosts", "cluster.gpus_per_host"),
        checks.other_world,
        "set one degree of parallel to auto",
    ),
    _of_mesh(
        "batch-ranks",
        "dp_replicate x dp_shard",
        (
            "train.global_batch_size",
            "train.micro_batch_size",
            "parallel.dp_replicate",
            "parallel.dp_shard",
        ),
        checks.uneven_batch,
        "change train.global_batch_size to a multiple",
    ),
    _of_schedule(
        "pp-micro-batches",
        (
            "parallel.pp",
            "parallel.pipeline.schedule",
            "parallel.pipeline.stages_per_rank",
            "train.global_batch_size",
            "train.micro_batch_size",
            "parallel.dp_replicate",
            "parallel.dp_shard",
        ),
        checks.unusable_micro_batches,
        SCHEDULE_FIX,
    ),
)
MESH_RULES = tuple(rule for rule in RULES if rule.scope != "job")
SCHEDULE_RULES = tuple(rule for rule in RULES if rule.scope == "schedule")
TENSOR_RULES = tuple(rule for rule in RULES if "parallel.tp" in rule.reads)

Schedule = Literal["1f1b", "gpipe", "interleaved_1f1b", "zbv"]
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe", "interleaved_1f1b", "zbv")
"""The simplest first."""


def refusals(request: Request, mesh: Mesh) -> tuple[Refusal, ...]:
    """All rules that `mesh` breaks; empty if the job can run on it, apart from memory."""
    wished = wished_pipelines(request.spec.parallel.pipeline, mesh.pp)
    case = Case(*request, mesh, wished[0])
    asked = RULES
    # `auto` can choose a schedule that works, so no rule about schedules is broken.
    if any(first_broken(case._replace(pipeline=one), SCHEDULE_RULES) is None for one in wished):
        asked = tuple(rule for rule in RULES if rule.scope != "schedule")
    found = ((rule, rule.check(case)) for rule in asked)
    return tuple(refusal_of(rule, broken, case) for rule, broken in found if broken)


def first_refusal(request: Request, mesh: Mesh) -> tuple[Rule, Broken] | None:
    """The first rule that `mesh` breaks; None if the job can run on it, apart from memory.

    Rules of scope `job` are not checked, because a search calls this thousands of times.
    """
    first, *others = wished_pipelines(request.spec.parallel.pipeline, mesh.pp)
    found = first_broken(Case(*request, mesh, first), MESH_RULES)
    # Rules of scope `mesh` do not read the schedule, so another one would break them too.
    if found is None or found[0].scope == "mesh":
        return found
    # Another schedule may still work: GPipe, for example, can run fewer micro batches than ranks.
    for pipeline in others:
        if first_broken(Case(*request, mesh, pipeline), MESH_RULES) is None:
            return None
    return found


def first_broken(case: Case, rules: tuple[Rule, ...]) -> tuple[Rule, Broken] | None:
    for rule in rules:
        broken = rule.check(case)
        if broken is not None:
            return rule, broken
    return None


@lru_cache(maxsize=1024)
def wished_pipelines(wish: PipelineSpec, pp: int) -> tuple[PipelineSpec, ...]:
    """The pipelines that `auto` may choose from before any rule is checked; never empty."""
    # Without stages all schedules do the same, so one entry is enough.
    if pp == 1:
        plain = wish.schedule == "auto" and wish.stages == 1
        return (replace(wish, schedule="1f1b") if plain else wish,)
    found = []
    for schedule in SCHEDULES if wish.schedule == "auto" else (wish.schedule,):
        try:
            found.append(replace(wish, schedule=schedule))
        except Invalid:
            continue  # the schedule does not allow the number of stages in the spec
    return tuple(found)
