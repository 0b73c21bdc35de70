"""Check before submission that a job can resume: its run, its newest checkpoint, and that the spec
has the same model and data.

`submit --resume`, `validate --resume` and `doctor --resume` use these checks. The ranks check the
same, but only after the job waited in the queue and holds all its hosts. File sizes are compared,
not checksums: the ranks check those in parallel, which takes seconds instead of hours.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.app.commands import commands_of
from orchestrator.app.schedulers import starts_here
from orchestrator.app.submission.inputs import Looked
from orchestrator.contract.codec import Problem
from orchestrator.contract.files.checkpoint_names import (
    SkippedCheckpoint,
    Trained,
    newest_complete,
    trained,
)
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.spec.job_spec import CommonSpec, JobSpec
from orchestrator.contract.spec.model_spec import LoraSpec, ModelSpec
from orchestrator.errors import JobError, NdctlError, PlanError
from orchestrator.job.state import Run
from orchestrator.journal import snapshot
from orchestrator.journal.journal import has_writer
from orchestrator.journal.run_dir_init import files_without_journal, unknown_run
from orchestrator.load import of_the_trainer, read_spec
from orchestrator.seams import Clock
from orchestrator.system import SystemClock

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
"""Fields of `ModelShape` that change the tensors of a checkpoint or their meaning."""
WORKINGS = (
    "hidden_act",
    "activation_function",
    "rms_norm_eps",
    "layer_norm_epsilon",
)
"""Keys of the model config that are not part of `ModelShape` and that the trainer compares."""
MOMENTS = {"adam": "adamw", "radam": "adamw"}
"""Optimizers that can resume from the checkpoint of another one with the same state."""
BYTES = "bytes"
TOKENS = ".tokens"


def look_back(
    spec: JobSpec, config: Mapping[str, Any] | None, run_dir: RunDir, environ: Mapping[str, str]
) -> Looked:
    """Check the run and the checkpoint that `spec` would resume from.

    Args:
        config: the model config; None if it cannot be read, which planning reports.
        run_dir: the path on this machine.
    """
    if spec.cluster.backend == "kubernetes":
        return _look_at_copy(spec, run_dir)
    if is_alive(run_dir, environ, SystemClock()):
        return Looked(refusal=is_running(run_dir, environ, "dashboard"))
    run = snapshot.replay(run_dir)
    if run.job is None:
        left = files_without_journal(run_dir)
        return Looked(refusal=unknown_run(run_dir, left) if left else no_run(run_dir))
    return look_at_run(spec, config, run_dir, run)


def look_at_run(
    spec: JobSpec, config: Mapping[str, Any] | None, run_dir: RunDir, run: Run
) -> Looked:
    """The same for a known run without a leader."""
    folder, passed = newest_complete(run_dir.checkpoints)
    refusal = steps_left(spec, run) or _lost(run_dir, run, folder, passed)
    if folder is None:
        resumes = "" if refusal else "from step 0, because the run has no checkpoint"
        return Looked(refusal=refusal, resumes=resumes)
    doubts = tuple(f"{one.name} is skipped: {one.why}" for one in passed)
    former = _spec_of(run_dir)
    made = trained(folder)
    where = f"as in the checkpoint {folder}"
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
    """The run directory is on a volume of the pods. This machine may know only the last step."""
    from orchestrator.backends.kubernetes.mirror.mirror_paths import known_mirrors

    unchecked = "the checkpoint was not checked: it is on a volume of the pods"
    copies = known_mirrors(run_dir.path.parent, spec.name)
    refusal = steps_left(spec, snapshot.replay(RunDir(copies[0]))) if len(copies) == 1 else None
    return Looked(unchecked=unchecked, refusal=refusal)


# The run


def is_alive(run_dir: RunDir, environ: Mapping[str, str], clock: Clock) -> bool:
    """Whether a leader has the job, or agents on this machine start, and one of them will lead."""
    # First the agents: their leader then still has the journal, or has ended it.
    return starts_here(snapshot.replay(run_dir), environ, clock) or has_writer(run_dir.journal)


def is_running(run_dir: RunDir, environ: Mapping[str, str], verb: str) -> JobError:
    run = snapshot.replay(run_dir)
    state = f"{run.state}, {run.stage.reason}" if run.job is not None else "it is starting"
    message = f"job {run_dir.path.name} already exists and has not ended: {state}"
    return JobError(message, fix=watch_or_end(run_dir, environ, verb))


def watch_or_end(run_dir: RunDir, environ: Mapping[str, str], verb: str) -> str:
    commands = commands_of(run_dir, environ)
    return f"watch it with `{commands.of(verb)}`, or cancel it with `{commands.of('cancel')}`"


def no_run(run_dir: RunDir) -> JobError:
    message = f"job {run_dir.path.name} has no run to resume"
    return JobError(f"{message} in {run_dir.path.parent}", fix="submit it without --resume")


def steps_left(spec: CommonSpec, run: Run) -> JobError | None:
    """The error if no steps are left; the job would hold its hosts for nothing."""
    if not isinstance(spec, JobSpec):
        if run.state != "SUCCEEDED":
            return None
        return JobError(
            f"job {spec.name} has succeeded, so there is nothing to resume", fix="--new starts over"
        )
    done = run.progress.saved
    if run.job is not None and run.state == "SUCCEEDED":
        done = max(done, run.job.steps)  # also if no checkpoint was written at the end
    if done < spec.train.steps:
        return None
    return JobError(
        f"job {spec.name} has no steps left: {done:,} of {spec.train.steps:,} steps are done",
        fix=f"raise train.steps, for example --set train.steps={2 * done}; --new starts over",
    )


def _lost(
    run_dir: RunDir, run: Run, folder: Path | None, passed: tuple[SkippedCheckpoint, ...]
) -> JobError | None:
    """The error if the run saved checkpoints but none is complete: it would start at step 0."""
    if folder is not None or not run.progress.saved:
        return None
    found = "; ".join(f"{one.name}: {one.why}" for one in passed) or "the folder is empty"
    return JobError(
        f"job {run_dir.path.name} saved step {run.progress.saved:,}, but {run_dir.checkpoints} has"
        f" no complete checkpoint ({found})",
        fix=f"restore the checkpoint, or {START_OVER}",
    )


# What decides the samples of a step


def _stream(spec: JobSpec, made: Trained, where: str) -> Iterator[Problem]:
    values = (
        ("train.seed", spec.train.seed, made.seed),
        ("train.global_batch_size", spec.train.global_batch_size, made.global_batch_size),
        ("data.sequence_length", spec.data.sequence_length, made.sequence_length),
    )
    fix = f"restore the value, or {START_OVER}"
    for key, now, was in values:
        if now != was:
            yield Problem(path=key, value=now, limit=f"{was}, {where}", fix=fix)


def _spec_of(run_dir: RunDir) -> JobSpec | None:
    """The spec of the newest launch that trained; None if it cannot be read, for example because an
    older version of ndctl wrote it."""
    try:
        return of_the_trainer(read_spec(run_dir.spec), "a resume")
    except (NdctlError, OSError):
        return None


def _changed(spec: JobSpec, former: JobSpec, where: str) -> Iterator[Problem]:
    """Changes that the ranks would refuse and that the checkpoint's marker does not show."""
    fix = f"restore the value, or {START_OVER}"
    now, was = spec.data.tokenizer, former.data.tokenizer
    if now != was and BYTES in (now, was) and not _is_packed(spec):
        limit = f"{was}, {where}, because another tokenizer gives other tokens"
        yield Problem(path="data.tokenizer", value=now, limit=limit, fix=fix)
    masked = spec.data.masks_documents
    if masked != former.data.masks_documents:
        yield Problem(
            path="data.document_mask",
            value=masked,
            limit=f"{not masked}, {where}, because tokens attend to others",
            fix=fix,
        )
    optimizer, before = spec.train.optimizer.name, former.train.optimizer.name
    if MOMENTS.get(optimizer, optimizer) != MOMENTS.get(before, before):
        limit = f"{before}, {where}, because {optimizer} has a different state"
        yield Problem(path="train.optimizer.name", value=optimizer, limit=limit, fix=fix)


def _is_packed(spec: JobSpec) -> bool:
    """Whether the files already hold tokens, so that no tokenizer is used."""
    return spec.data.format == "tokens" or spec.data.files.endswith(TOKENS)


def _doubts(spec: JobSpec, former: JobSpec) -> Iterator[str]:
    """Changed paths may hold the same data. Only the ranks read the files and decide."""
    for key in ("files", "format", "column", "prompt_column", "tokenizer"):
        was, now = getattr(former.data, key), getattr(spec.data, key)
        if was != now:
            yield (
                f"data.{key} changed from {was} to {now}: the ranks refuse to resume unless the"
                " tokens are the same"
            )


# The model


def _model(
    model: ModelSpec, config: Mapping[str, Any], made: Trained, where: str
) -> Iterator[Problem]:
    fix = f"use the model of the checkpoint, or {START_OVER}"
    if differs := _differences(made.config, config):
        key, value = _told(model, config, made.config)
        limit = f"the same model {where} ({'; '.join(differs)})"
        yield Problem(path=key, value=value, limit=limit, fix=fix)
    if _adapters(model.lora) != _adapters(made.lora):
        limit = f"{_adapters(made.lora)}, {where}"
        yield Problem(path="model.lora", value=_adapters(model.lora), limit=limit, fix=fix)


def _told(model: ModelSpec, now: Mapping[str, Any], was: Mapping[str, Any]) -> tuple[str, Any]:
    """The key of the spec that names the model, and its value. For a config in the spec, the first
    key that differs."""
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
    except PlanError:  # an unknown model family; only the ranks can compare it
        shapes = []
    else:
        shapes = [(key, getattr(there, key), getattr(here, key)) for key in SHAPE]
    return [
        f"{key} changed from {before} to {after}"
        for key, before, after in (*shapes, *workings)
        if before != after
    ]


def _adapters(lora: LoraSpec | None) -> str:
    """The settings that decide the shapes of the adapter tensors and where they are added."""
    if lora is None:
        return "no adapters"
    on = f"adapters of rank {lora.rank} on {', '.join(lora.target_modules)}"
    return f"{on}, alpha {lora.alpha:g}, quantize {lora.quantize}"
