"""What a job resumes from, looked at before anything is queued: its run, its newest checkpoint, and
whether the spec still is of the same model and data.

`submit --resume`, `validate --resume` and `doctor --resume` ask here. The ranks would refuse the
same, but only after the queue and with all hosts held. Sizes of files are compared, and not their
checksums: the ranks do that, each a part, where it takes seconds and not hours.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.app.commands import commands_of
from orchestrator.app.submission.inputs import Looked
from orchestrator.contract.codec import Problem
from orchestrator.contract.files.checkpoint_names import (
    PassedOver,
    Trained,
    newest_complete,
    trained,
)
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.contract.spec.model_spec import LoraSpec, ModelSpec
from orchestrator.errors import JobError, NdctlError, PlanError
from orchestrator.job.state import Run
from orchestrator.journal import snapshot
from orchestrator.journal.journal import has_writer
from orchestrator.journal.run_dir_init import left_behind, unknown_run
from orchestrator.load import read_spec

START_OVER = "start over with --new"
SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "num_experts",
    "tied_embeddings",
)
"""Of `ModelShape`: what changes the tensors of a checkpoint, or what they mean."""
WORKINGS = (
    "hidden_act",
    "activation_function",
    "rms_norm_eps",
    "layer_norm_epsilon",
)
"""Keys of a model's config that no shape tells, and by which the trainer refuses as well."""
MOMENTS = {"adam": "adamw", "radam": "adamw"}
"""Optimizers that keep the same moments as another, so that they resume from its checkpoints."""
BYTES = "bytes"
TOKENS = ".tokens"


def look_back(
    spec: JobSpec, config: Mapping[str, Any] | None, run_dir: RunDir, environ: Mapping[str, str]
) -> Looked:
    """Look at what `spec` would resume from.

    Args:
        config: of the model; None where it cannot be read, which is told elsewhere.
        run_dir: as this machine sees it.
    """
    if spec.cluster.backend == "kubernetes":
        return _look_at_copy(spec, run_dir)
    if has_writer(run_dir.journal):
        return Looked(refusal=is_running(run_dir, environ, "dashboard"))
    run = snapshot.known(run_dir)
    if run.job is None:
        left = left_behind(run_dir)
        return Looked(refusal=unknown_run(run_dir, left) if left else no_run(run_dir))
    return look_at_run(spec, config, run_dir, run)


def look_at_run(
    spec: JobSpec, config: Mapping[str, Any] | None, run_dir: RunDir, run: Run
) -> Looked:
    """The same of a run that is known, and that nobody leads."""
    folder, passed = newest_complete(run_dir.checkpoints)
    refusal = steps_left(spec, run) or _lost(run_dir, run, folder, passed)
    if folder is None:
        resumes = "" if refusal else "from step 0: the run saved no checkpoint"
        return Looked(refusal=refusal, resumes=resumes)
    doubts = tuple(f"{one.name} is passed over: {one.why}" for one in passed)
    former = _spec_of(run_dir)
    made = trained(folder)
    where = f"as in {folder}, from which the job resumes"
    problems = (
        *(() if made is None else _stream(spec, made, where)),
        *(() if made is None or config is None else _model(spec.model, config, made, where)),
        *(() if former is None else _changed(spec, former, where)),
    )
    if former is not None and not problems:
        doubts += tuple(_doubts(spec, former))
    resumes = f"from {folder.name}, of {spec.train.steps:,} steps: {folder}"
    return Looked(problems=problems, refusal=refusal, doubts=doubts, resumes=resumes)


def _look_at_copy(spec: JobSpec, run_dir: RunDir) -> Looked:
    """The run directory is on a volume of the pods: only how far the job came may be known here."""
    from orchestrator.backends.kubernetes.mirror.mirror_paths import known_mirrors

    unchecked = "the checkpoint was not checked: the pods see their own volumes"
    copies = known_mirrors(run_dir.path.parent, spec.name)
    refusal = steps_left(spec, snapshot.known(RunDir(copies[0]))) if len(copies) == 1 else None
    return Looked(unchecked=unchecked, refusal=refusal)


# The run


def is_running(run_dir: RunDir, environ: Mapping[str, str], verb: str) -> JobError:
    fix = watch_or_end(run_dir, environ, verb)
    return JobError(f"job {run_dir.path.name} is running", fix=fix)


def watch_or_end(run_dir: RunDir, environ: Mapping[str, str], verb: str) -> str:
    commands = commands_of(run_dir, environ)
    return f"watch it with `{commands.of(verb)}`, end it with `{commands.of('cancel')}`"


def no_run(run_dir: RunDir) -> JobError:
    message = f"job {run_dir.path.name} has no run to resume"
    return JobError(f"{message} in {run_dir.path.parent}", fix="submit it without --resume")


def steps_left(spec: JobSpec, run: Run) -> JobError | None:
    """The refusal of a job that has none: it would hold every host for nothing."""
    done = run.progress.saved
    if run.job is not None and run.state == "SUCCEEDED":
        done = max(done, run.job.steps)  # also where no checkpoint was written at the end
    if done < spec.train.steps:
        return None
    return JobError(
        f"job {spec.name} has nothing left to do: {done:,} of {spec.train.steps:,} steps are done",
        fix=f"raise train.steps, for example --set train.steps={2 * done}; --new starts over",
    )


def _lost(
    run_dir: RunDir, run: Run, folder: Path | None, passed: tuple[PassedOver, ...]
) -> JobError | None:
    """Where the job saved checkpoints, and none is whole any more, it would begin at step 0."""
    if folder is not None or not run.progress.saved:
        return None
    found = "; ".join(f"{one.name}: {one.why}" for one in passed) or "there is none"
    return JobError(
        f"job {run_dir.path.name} saved step {run.progress.saved:,}, and {run_dir.checkpoints} has"
        f" no whole checkpoint ({found})",
        fix=f"put the checkpoint back, or {START_OVER}",
    )


# What decides the samples of a step


def _stream(spec: JobSpec, made: Trained, where: str) -> Iterator[Problem]:
    values = (
        ("train.seed", spec.train.seed, made.seed),
        ("train.global_batch_size", spec.train.global_batch_size, made.global_batch_size),
        ("data.sequence_length", spec.data.sequence_length, made.sequence_length),
    )
    fix = f"put it back, or {START_OVER}"
    for key, now, was in values:
        if now != was:
            yield Problem(path=key, value=now, limit=f"{was}, {where}", fix=fix)


def _spec_of(run_dir: RunDir) -> JobSpec | None:
    """Of the newest launch that came to train; None where it cannot be read, as one that an older
    ndctl wrote."""
    try:
        return read_spec(run_dir.spec)
    except (NdctlError, OSError):
        return None


def _changed(spec: JobSpec, former: JobSpec, where: str) -> Iterator[Problem]:
    """What the ranks are sure to refuse, of that which a checkpoint's marker does not tell."""
    fix = f"put it back, or {START_OVER}"
    now, was = spec.data.tokenizer, former.data.tokenizer
    if now != was and BYTES in (now, was) and not _is_packed(spec):
        limit = f"{was}, {where}: it makes other tokens of the same text"
        yield Problem(path="data.tokenizer", value=now, limit=limit, fix=fix)
    optimizer, before = spec.train.optimizer.name, former.train.optimizer.name
    if MOMENTS.get(optimizer, optimizer) != MOMENTS.get(before, before):
        limit = f"{before}, {where}: {optimizer} keeps other moments"
        yield Problem(path="train.optimizer.name", value=optimizer, limit=limit, fix=fix)


def _is_packed(spec: JobSpec) -> bool:
    """Of files that hold tokens already no tokenizer makes any."""
    return spec.data.format == "tokens" or spec.data.files.endswith(TOKENS)


def _doubts(spec: JobSpec, former: JobSpec) -> Iterator[str]:
    """Files and tokenizers count by what is in them, and move: only the ranks read it."""
    for key in ("files", "format", "column", "prompt_column", "tokenizer"):
        was, now = getattr(former.data, key), getattr(spec.data, key)
        if was != now:
            yield (
                f"data.{key} was {was} and is {now}: the ranks refuse to resume unless it gives"
                " the same tokens"
            )


# The model


def _model(
    model: ModelSpec, config: Mapping[str, Any], made: Trained, where: str
) -> Iterator[Problem]:
    fix = f"put the model of the checkpoint back, or {START_OVER}"
    if differs := _differences(made.config, config):
        key, value = _told(model, config, made.config)
        limit = f"the same model {where} ({'; '.join(differs)})"
        yield Problem(path=key, value=value, limit=limit, fix=fix)
    if _adapters(model.lora) != _adapters(made.lora):
        limit = f"{_adapters(made.lora)}, {where}"
        yield Problem(path="model.lora", value=_adapters(model.lora), limit=limit, fix=fix)


def _told(model: ModelSpec, now: Mapping[str, Any], was: Mapping[str, Any]) -> tuple[str, Any]:
    """The key of the spec that names another model, and its value: of one that is written out, the
    first key that is another."""
    for key in ("preset", "path"):
        if getattr(model, key) is not None:
            return f"model.{key}", getattr(model, key)
    changed = next((key for key in now if key in was and now[key] != was[key]), None)
    return (
        ("model.config", dict(now))
        if changed is None
        else (f"model.config.{changed}", now[changed])
    )


def _differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    from orchestrator.plan.model.families import shape_of

    workings = [(key, was[key], now[key]) for key in WORKINGS if key in was and key in now]
    try:
        there, here = shape_of(was), shape_of(now)
    except PlanError:  # of a family that is not planned: the ranks know
        shapes = []
    else:
        shapes = [(key, getattr(there, key), getattr(here, key)) for key in SHAPE]
    return [
        f"{key} was {before} and is {after}"
        for key, before, after in (*shapes, *workings)
        if before != after
    ]


def _adapters(lora: LoraSpec | None) -> str:
    """What of them decides the shapes of tensors, and what they are added to."""
    if lora is None:
        return "no adapters"
    on = f"adapters of rank {lora.rank} on {', '.join(lora.target_modules)}"
    return f"{on}, alpha {lora.alpha:g}, quantize {lora.quantize}"
