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


def _tp_divides(name: str, what: str, size: Callable[[ModelShape], int], fix: str = TP_FIX) -> Rule:
    return Rule(
        name=name,
        scope="mesh",
        axis="tp",
        reads=("parallel.tp",),
        check=checks.divides(what, size),
        fix=fix,
    )


RULES: tuple[Rule, ...] = (
    Rule(
        name="hosts-in-inventory",
        scope="job",
        reads=("cluster.hosts",),
        check=checks.too_few_hosts,
        fix=HOST_FIX,
    ),
    Rule(
        name="devices-per-host",
        scope="job",
        reads=("cluster.gpus_per_host", "cluster.hosts"),
        check=checks.too_few_devices,
        fix=HOST_FIX,
    ),
    Rule(
        name="hosts-usable",
        scope="job",
        reads=("cluster.hosts", "cluster.gpus_per_host"),
        check=checks.unusable_hosts,
        fix=HOST_FIX,
    ),
    Rule(
        name="byte-vocabulary",
        scope="job",
        reads=("data.tokenizer",),
        check=checks.small_vocabulary,
        fix=f"use a model with a vocab_size of {checks.BYTE_TOKENS} or more"
        f" (--set model.config.vocab_size={checks.BYTE_TOKENS} where the config is inline)",
    ),
    Rule(
        name="sequence-positions",
        scope="job",
        reads=("data.sequence_length",),
        check=checks.long_sequence,
        fix=FULL_FIX,
    ),
    Rule(
        name="sequence-window",
        scope="job",
        reads=("data.sequence_length",),
        check=checks.sliding_window,
        fix=FULL_FIX,
    ),
    Rule(
        name="full-attention",
        scope="job",
        reads=("model",),
        check=checks.other_layer_types,
        fix="use a model whose layers are all full_attention",
    ),
    Rule(
        name="mask-dropout",
        scope="job",
        reads=("data.document_mask",),
        check=checks.dropout_inside_documents,
        fix="set attention dropout to 0 in the model's config, or data.document_mask=false",
    ),
    Rule(
        name="lora-modules",
        scope="job",
        reads=("model.lora.target_modules",),
        check=checks.unknown_modules,
        fix="name linear layers of the model in model.lora.target_modules",
    ),
    Rule(
        name="tp-near",
        scope="mesh",
        axis="tp",
        reads=("parallel.tp", "cluster.gpus_per_host", "cluster.hosts"),
        check=checks.distant_group,
        fix=TP_FIX,
    ),
    Rule(
        name="tp-fused",
        scope="mesh",
        axis="tp",
        reads=("parallel.tp",),
        check=checks.fused_projections,
        fix="set parallel.tp=1",
    ),
    _tp_divides("tp-heads", "heads", lambda shape: shape.num_heads),
    _tp_divides("tp-kv-heads", "kv heads", lambda shape: shape.num_kv_heads),
    _tp_divides(
        "tp-vocabulary", "vocabulary entries", lambda shape: shape.vocab_size, VOCABULARY_FIX
    ),
    _tp_divides("tp-intermediate", "intermediate columns", lambda shape: shape.intermediate_size),
    Rule(
        name="tp-sequence",
        scope="mesh",
        axis="tp",
        reads=("parallel.tp", "parallel.cp", "data.sequence_length"),
        check=checks.uneven_tokens,
        fix=TP_FIX,
    ),
    Rule(
        name="cp-sequence",
        scope="mesh",
        axis="cp",
        reads=("parallel.cp", "parallel.context", "data.sequence_length"),
        check=checks.uneven_sequence,
        fix="change data.sequence_length or parallel.cp",
    ),
    Rule(
        name="cp-heads",
        scope="mesh",
        axis="cp",
        reads=("parallel.cp", "parallel.tp", "parallel.context"),
        check=checks.uneven_heads,
        fix="set parallel.context=ring or all_gather, or change parallel.cp",
    ),
    Rule(
        name="cp-dropout",
        scope="mesh",
        axis="cp",
        reads=("parallel.cp",),
        check=checks.attention_dropout,
        fix="set parallel.cp=1, or attention dropout to 0 in the model's config",
    ),
    Rule(
        name="reshard-group",
        scope="mesh",
        axis="dp_shard",
        reads=("parallel.fsdp.reshard_after_forward", "parallel.dp_shard", "parallel.cp"),
        check=checks.uneven_reshard,
        fix="set parallel.fsdp.reshard_after_forward=auto",
    ),
    Rule(
        name="pp-layers",
        scope="schedule",
        axis="pp",
        reads=("parallel.pp", "parallel.pipeline.schedule", "parallel.pipeline.stages_per_rank"),
        check=checks.few_layers,
        fix="set parallel.pp=auto, or fewer stages per rank",
    ),
    Rule(
        name="zbv-selective",
        scope="schedule",
        axis="pp",
        reads=(
            "train.activation_checkpointing",
            "parallel.pipeline.schedule",
            "parallel.pp",
        ),
        check=checks.split_selective,
        fix=SCHEDULE_FIX,
    ),
    Rule(
        name="zbv-compile",
        scope="schedule",
        axis="pp",
        reads=("train.compile", "parallel.pipeline.schedule", "parallel.pp"),
        check=checks.split_compiled,
        fix=SCHEDULE_FIX,
    ),
    Rule(
        name="float8-compile",
        scope="job",
        reads=("train.float8", "train.compile"),
        check=checks.uncompiled_float8,
        fix="set train.compile=true, or train.float8=false",
    ),
    Rule(
        name="float8-device",
        scope="job",
        reads=("train.float8",),
        check=checks.float8_device,
        fix="set train.float8=false",
    ),
    Rule(
        name="float8-adapters",
        scope="job",
        reads=("train.float8", "model.lora"),
        check=checks.float8_adapters,
        fix="set train.float8=false",
    ),
    Rule(
        name="float8-sides",
        scope="mesh",
        axis="tp",
        reads=("train.float8", "parallel.tp"),
        check=checks.float8_sides,
        fix="set train.float8=false",
    ),
    Rule(
        name="world-size",
        scope="mesh",
        axis="degrees",
        reads=("parallel", "cluster.hosts", "cluster.gpus_per_host"),
        check=checks.other_world,
        fix="set one degree of parallel to auto",
    ),
    Rule(
        name="batch-ranks",
        scope="mesh",
        axis="dp_replicate x dp_shard",
        reads=(
            "train.global_batch_size",
            "train.micro_batch_size",
            "parallel.dp_replicate",
            "parallel.dp_shard",
        ),
        check=checks.uneven_batch,
        fix="change train.global_batch_size to a multiple",
    ),
    Rule(
        name="pp-micro-batches",
        scope="schedule",
        axis="pp",
        reads=(
            "parallel.pp",
            "parallel.pipeline.schedule",
            "parallel.pipeline.stages_per_rank",
            "train.global_batch_size",
            "train.micro_batch_size",
            "parallel.dp_replicate",
            "parallel.dp_shard",
        ),
        check=checks.unusable_micro_batches,
        fix=SCHEDULE_FIX,
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
