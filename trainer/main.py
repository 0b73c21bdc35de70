"""The training of one rank from start to end; read this file first."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from ndctl.rank.fence import Admit
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.read_json import read_json
from orchestrator.contract.spec.train_spec import SKIP_ON_DEVICE
from trainer.checkpoint.memory.opened import digests_of, open_memory
from trainer.checkpoint.memory.saves import start_saving
from trainer.checkpoint.resume import find_checkpoint, resume
from trainer.checkpoint.save import Checkpoints
from trainer.checkpoint.schedule import Resumed
from trainer.checkpoint.state import Origin, Stream, TrainingState, trained_parameters
from trainer.config import with_dtype
from trainer.data.batches import Batches
from trainer.data.ledger import SampleLedger, Start
from trainer.data.loader import Loader
from trainer.data.open_data import open_sequences
from trainer.evaluate import Evaluator
from trainer.loop import Training, log_step, train
from trainer.loss import TokenLoss
from trainer.measure.flops import TERA, attended_tokens, flops_per_token, job_peak
from trainer.measure.fullest import Fullest
from trainer.measure.oom_snapshot import write_if_out_of_memory
from trainer.measure.profiling import Profiling
from trainer.measure.records import Records
from trainer.measure.report import open_report
from trainer.measure.timing import Stopwatch, stopwatch
from trainer.model.adapters import base_of
from trainer.model.build import check_model, read_model_config
from trainer.model.decoder import Decoder
from trainer.model.float8 import scale_after_steps
from trainer.optimizer import build_optimizer
from trainer.parallel.building import build_model, choose_passes
from trainer.parallel.compile import report_compilation
from trainer.parallel.context import local_positions
from trainer.parallel.data import gather_after_step, parameters_to_update
from trainer.parallel.passes import Passes
from trainer.parallel.tied import find_tied
from trainer.rank.determinism import make_deterministic
from trainer.rank.devices import has_fast_bfloat16, name_of
from trainer.rank.fence import admit_of, lock_out
from trainer.rank.ranks import Ranks, arrange, gpu_state, peak_memory_bytes, process_group
from trainer.rank.runtime import Runtime
from trainer.step import Stepper

LOG = logging.getLogger("trainer")


def main(config: TrainingConfig, runtime: Runtime) -> int:
    """Train; returns the exit code of the process."""
    if config.train.deterministic:
        make_deterministic()
    with process_group(runtime.env, config.pause_s), lock_out(Path(config.out), runtime.env):
        ranks = arrange(config.mesh, runtime.env)
        try:
            return train_on(ranks, config, runtime)
        except torch.OutOfMemoryError as exc:
            folder = RunDir(Path(config.out)).profiles(runtime.env.attempt)
            write_if_out_of_memory(exc, folder, runtime.env.rank)
            raise


def train_on(ranks: Ranks, config: TrainingConfig, runtime: Runtime) -> int:
    job, done = assemble(ranks, config, runtime)
    compiling = report_compilation(runtime.reporter) if config.train.compile else nullcontext()
    with job.records or nullcontext(), job.stepper.batches, compiling:
        return train(job, done)


def assemble(ranks: Ranks, config: TrainingConfig, runtime: Runtime) -> tuple[Training, int]:
    """The training job, and the number of steps that earlier attempts have done."""
    config = with_dtype(config, fast_bfloat16=has_fast_bfloat16(ranks.device))
    if ranks.env.rank == 0:
        LOG.info("computing in %s on %s", config.train.compute_dtype, name_of(ranks.device))
    torch.manual_seed(config.train.seed + ranks.env.rank)
    run = RunDir(Path(config.out))
    batches = open_data(config, ranks, runtime)
    memory = open_memory(config.checkpoint.memory, ranks, digests_of(config), runtime.reporter)
    if memory is not None:
        runtime.on_leave.callback(memory.close)
    found = find_checkpoint(
        run.checkpoints, ranks, verify=config.checkpoint.verify, skip=runtime.skip, memory=memory
    )
    stages = build_model(config, ranks, batches.positions_T, resumed=found.has_weights)
    parameters = named_to_update(stages)
    watch = stopwatch(ranks.device)
    optimizer = optimizer_of(config, stages, [parameter for _, parameter in parameters], watch)
    state = TrainingState(
        parameters=trained_parameters(stages),
        optimizer=optimizer,
        stream=stream_of(config, batches),
        origin=origin_of(config),
        ranks=ranks,
    )
    done, skipped = resume(found, state, runtime.reporter)
    batches, state = replace(batches, skipped=skipped), replace(state, skipped=skipped)
    tied = find_tied(stages, ranks.mesh["pp"].get_group())
    tied.sync_after_load(optimizer)
    passes = choose_passes(stages, config, ranks, loss_of(config, ranks), tied, watch)
    stepper = Stepper(
        parameters=parameters,
        tied=tied.copies,
        passes=passes,
        optimizer=optimizer,
        batches=Loader(batches),
        ranks=ranks,
        tokens_per_step=tokens_per_step(config),
        grad_clip=config.train.grad_clip,
        watch=watch,
        update_threads=update_threads_of(config, runtime.processors, runtime.env.local_world_size),
    )
    records = open_records(config, batches, ranks, done) if ranks.env.rank == 0 else None
    checkpoints = Checkpoints(
        run.checkpoints,
        state,
        config.checkpoint,
        runtime.reporter,
        Resumed(done, done if found.in_memory is None else found.on_disk),
        before_commit=nothing if records is None else records.sync,
    )
    checkpoints.ends_at(config.train.steps)
    runtime.on_leave.callback(checkpoints.close)
    checkpoints.memory = start_saving(
        memory,
        state,
        at_once if records is None else records.written,
        found.in_memory,
        runtime.reporter,
    )
    job = Training(
        config=config,
        ranks=ranks,
        stepper=stepper,
        run_ahead=run_ahead_of(config, ranks.device),
        skips=state.skips,
        spikes=state.spikes,
        checkpoints=checkpoints,
        evaluator=evaluator_of(config, batches, passes, stages, runtime),
        profiling=profiling_of(config, ranks, runtime),
        fullest=Fullest(ranks.device, done, config.train.steps),
        records=records,
        peak_tokens_per_second=peak_tokens_per_second(config, stages, ranks),
        runtime=runtime,
    )
    return job, done


def open_data(config: TrainingConfig, ranks: Ranks, runtime: Runtime) -> Batches:
    def check(num_tokens: int) -> None:
        """Find mistakes in the model config before the data is packed, which may take hours."""
        values = read_model_config(config.model)
        check_model(values, num_tokens, config.data.sequence_length)

    tokens = RunDir(Path(config.out)).tokens
    data = open_sequences(config, tokens, check, runtime.reporter)
    coords = config.mesh.coords(ranks.env.rank)
    return Batches(
        train=data.train,
        validation=data.validation,
        fingerprint=data.fingerprint,
        seed=config.train.seed,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.micro_batch_size,
        data_parallel=config.mesh.data_parallel,
        data_rank=ranks.data_rank,
        # Ranks that differ in pp, cp or tp alone read the same samples; the ledger counts one.
        counts_in_ledger=not any(coords[axis] for axis in ("pp", "cp", "tp")),
        masks_documents=config.data.masks_documents,
        positions_T=local_positions(
            config.data.sequence_length, config.parallel.context, config.mesh.cp, coords["cp"]
        ),
        device=ranks.device,
    )


def named_to_update(stages: list[Decoder]) -> list[tuple[str, nn.Parameter]]:
    """Parameters of the optimizer with their names, without wrapper prefixes."""
    return [pair for stage in stages for pair in parameters_to_update(stage)]


def optimizer_of(
    config: TrainingConfig, stages: list[Decoder], parameters: list[nn.Parameter], watch: Stopwatch
) -> torch.optim.Optimizer:
    optimizer = build_optimizer(parameters, config.train.optimizer)
    # The hooks below may be collective, so stop measuring this rank's own work before them.
    optimizer.register_step_post_hook(lambda *_: watch.before_collective())
    gather_after_step(optimizer, stages)
    if config.train.float8:
        scale_after_steps(stages, optimizer)
    optimizer.register_step_post_hook(lambda *_: watch.after_collective())
    return optimizer


def tokens_per_step(config: TrainingConfig) -> int:
    return config.train.global_batch_size * config.data.sequence_length


def loss_of(config: TrainingConfig, ranks: Ranks) -> TokenLoss:
    per_rank = tokens_per_step(config) // (config.mesh.data_parallel * config.mesh.cp)
    # GPipe runs the forward pass of all micro batches before the first backward pass.
    many_forward = config.mesh.pp > 1 and config.parallel.pipeline.schedule == "gpipe"
    return TokenLoss(per_rank, ranks.device, config.train, recompute=many_forward)


def stream_of(config: TrainingConfig, batches: Batches) -> Stream:
    return Stream(
        seed=config.train.seed,
        global_batch_size=config.train.global_batch_size,
        sequence_length=config.data.sequence_length,
        data=batches.fingerprint,
        base=base_of(config.model),
        document_mask=config.data.masks_documents,
    )


def origin_of(config: TrainingConfig) -> Origin:
    return Origin(
        config=read_json(read_model_config(config.model).to_json_string(use_diff=False)),
        tokenizer=absolute_source(config.data.tokenizer),
        lora=config.model.lora,
        base=absolute_source(config.model.weights) if config.model.weights else None,
    )


def absolute_source(source: str) -> str:
    """An absolute path if `source` is a folder, else the hub id unchanged."""
    return str(Path(source).resolve()) if Path(source).is_dir() else source


def run_ahead_of(config: TrainingConfig, device: torch.device) -> int:
    """The value of `train.run_ahead`.

    `auto` is one step on a GPU: the host then has a whole step to launch the next one, and more
    would only delay what it learns. gloo's collectives wait on a CPU, so there it cannot help.
    """
    if config.train.run_ahead != "auto":
        return config.train.run_ahead
    skips = config.train.optimizer.name in SKIP_ON_DEVICE
    return int(device.type == "cuda" and skips and not config.parallel.fsdp.cpu_offload)


def update_threads_of(config: TrainingConfig, processors: int, local_ranks: int) -> int:
    """Threads of the optimizer's update. On offloaded weights it runs on the host, and would take
    longer than the rest of the step on the one thread that a rank has."""
    if not config.parallel.fsdp.cpu_offload:
        return 1
    return max(1, processors // local_ranks)


def at_once(then: Callable[[], None]) -> None:
    """What ranks without records do with what must wait for records."""
    then()


def nothing() -> None:
    """What ranks without records do before a checkpoint becomes complete."""


def open_records(config: TrainingConfig, batches: Batches, ranks: Ranks, done: int) -> Records:
    """What rank 0 writes of each step. Other ranks write nothing, because the totals are the same
    on every rank."""
    run = RunDir(Path(config.out))
    admit = admit_of(run, ranks.env)
    return Records(
        open_ledger(run, batches, ranks.env, admit),
        open_report(run, config.train, done, admit),
        peak_memory_bytes=partial(peak_memory_bytes, ranks.device),
        gpu=partial(gpu_state, ranks.device),
        log=partial(log_step, last=config.train.steps),
    )


def open_ledger(run: RunDir, batches: Batches, env: RankEnv, admit: Admit) -> SampleLedger:
    start = Start(
        attempt=env.attempt,
        seed=batches.seed,
        num_samples=batches.train.num,
        global_batch_size=batches.global_batch_size,
        data=batches.fingerprint,
        skipped=batches.skipped,
    )
    return SampleLedger(run.samples, start, admit)


def evaluator_of(
    config: TrainingConfig,
    batches: Batches,
    passes: Passes,
    stages: list[Decoder],
    runtime: Runtime,
) -> Evaluator | None:
    if config.train.eval_every is None:
        return None
    return Evaluator(
        every=config.train.eval_every,
        sequences=config.train.eval_sequences,
        data=batches,
        passes=passes,
        stages=stages,
        device=batches.device,
        reporter=runtime.reporter,
    )


def profiling_of(config: TrainingConfig, ranks: Ranks, runtime: Runtime) -> Profiling:
    spec = config.train.profile
    named = spec is not None and ranks.env.rank in spec.ranks
    folder = RunDir(Path(config.out)).profiles(ranks.env.attempt)
    return Profiling(spec if named else None, folder, ranks.device, runtime.reporter)


def peak_tokens_per_second(
    config: TrainingConfig, stages: list[Decoder], ranks: Ranks
) -> float | None:
    """Tokens per second at the devices' peak FLOPS; a collective, so all ranks must call it."""
    each = flops_per_token(stages, ranks, attended_tokens(config.data))
    dtype = config.train.compute_dtype
    peak = job_peak(ranks, dtype, config.train.device_tflops)
    if peak is None:
        return None
    if ranks.env.rank == 0:
        one = peak / ranks.mesh.size() / TERA
        # Also with float8: figures with and without it then compare.
        LOG.info("mfu is relative to %.4g TFLOPS per device, its peak in %s", one, dtype)
    return peak / each
