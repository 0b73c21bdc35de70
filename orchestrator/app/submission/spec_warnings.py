"""Warnings about a spec that is valid."""

import math
from collections.abc import Iterator

from orchestrator.contract.devices import CPU
from orchestrator.contract.plan import Plan
from orchestrator.contract.spec.job_spec import CommonSpec, JobSpec
from orchestrator.contract.spec.kubernetes_spec import plain_secrets
from orchestrator.contract.spec.slurm_spec import plain_secrets as plain_on_slurm


def spec_warnings(spec: CommonSpec, plan: Plan | None = None) -> Iterator[str]:
    """Secrets in plain text, and settings that few users want. Without a plan, those that depend on
    the devices are left out."""
    yield from _secrets(spec)
    if isinstance(spec, JobSpec):
        yield from _packed_answers(spec)
        if plan is not None:
            yield from _slow_products(spec, plan)
            yield from _untried_on_gpus(spec, plan)
            yield from _indivisible_batch(spec, plan)


def _secrets(spec: CommonSpec) -> Iterator[str]:
    """A warning for each environment variable that looks like a secret and is plain text."""
    for key in plain_on_slurm(spec.cluster.slurm) if spec.cluster.backend == "slurm" else ():
        name = key.rpartition(".")[2]
        yield (
            f"cluster.slurm.{key} looks like a secret. It is stored as plain text in the spec, the"
            " run directory and the batch script, which Slurm also keeps\n"
            "  fix: write it to a file that only you can read, and add"
            f" `- export {name}=$(cat FILE)` to cluster.slurm.setup"
        )
    kubernetes, job = spec.cluster.kubernetes, spec.name
    for key in plain_secrets(kubernetes) if spec.cluster.backend == "kubernetes" else ():
        name = key.rpartition(".")[2]
        of = f"-n {kubernetes.namespace} " if kubernetes.namespace else ""
        yield (
            f"cluster.kubernetes.{key} looks like a secret. It is stored as plain text in the spec,"
            f" the run directory and ConfigMap {job}-launch\n"
            f"  fix: `kubectl {of}create secret generic {job}-env --from-literal={name}=…`, and set"
            f" cluster.kubernetes.env: {{{name}: {{secret: {job}-env, key: {name}}}}}"
        )


def _slow_products(spec: JobSpec, plan: Plan) -> Iterator[str]:
    if spec.train.dtype == "float32" and plan.profile not in (None, CPU):
        yield (
            f"train.dtype=float32 on {plan.profile}: the trainer does not use TF32, so matrix"
            " products run many times slower than in bfloat16\n"
            "  fix: remove train.dtype, or set it to bfloat16"
        )


def _untried_on_gpus(spec: JobSpec, plan: Plan) -> Iterator[str]:
    if spec.resilience.keep_ranks and plan.profile not in (None, CPU):
        yield (
            f"resilience.keep_ranks=true on {plan.profile}: ranks were kept on CPUs only so far\n"
            "  fix: remove it, or try it with --drill kill:rank=1@step=25 first"
        )


def _indivisible_batch(spec: JobSpec, plan: Plan) -> Iterator[str]:
    """A batch, such as an odd one, that leaves no data parallelism although the spec asks for none
    of the axes that then take its place."""
    wish, train = spec.parallel, spec.train
    fixed = [degree for degree in (wish.pp, wish.cp, wish.tp) if degree != "auto"]
    ranks = plan.world_size // math.prod(fixed)
    micro = 1 if train.micro_batch_size == "auto" else train.micro_batch_size
    passes = train.global_batch_size // micro
    free = "auto" in (wish.dp_replicate, wish.dp_shard)
    if not free or ranks == 1 or plan.mesh.data_parallel > 1 or math.gcd(passes, ranks) > 1:
        return
    batch = f"train.global_batch_size={train.global_batch_size}"
    parts = f" with train.micro_batch_size={micro}" if micro > 1 else ""
    whole = micro * ranks
    nearest = max(1, round(train.global_batch_size / whole)) * whole
    yield (
        f"{batch}{parts}: no data parallelism on {ranks:,} ranks, because {passes} micro"
        f" batch{'es' if passes > 1 else ''} per step cannot be shared among them; the plan is"
        f" {plan.mesh}\n  fix: set train.global_batch_size to a multiple of {whole}, such as"
        f" {nearest}"
    )


def _packed_answers(spec: JobSpec) -> Iterator[str]:
    data = spec.data
    if data.prompt_column is not None and not data.masks_documents:
        yield (
            f"data.prompt_column={data.prompt_column} with data.document_mask=false: prompts and"
            f" answers are packed into sequences of {data.sequence_length:,} tokens without masks"
            " between documents. An answer also attends to the prompts and answers before it in its"
            " sequence\n  fix: set data.document_mask to auto or true"
        )
