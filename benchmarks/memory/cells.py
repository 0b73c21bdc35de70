"""Cells of the memory table: planned, and traced by one real step with fake tensors
(`benchmarks/traced`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from benchmarks.traced.step import Traced, traced
from orchestrator.contract.codec import decode
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.mesh import AXES
from orchestrator.contract.plan import Memory
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.contract.spec.model_presets import PRESETS
from orchestrator.plan.memory.peak_memory import memory_of
from orchestrator.plan.memory.states import States, states_of, units_of
from orchestrator.plan.model.families import shape_of
from orchestrator.plan.setup import Setup, setup_of
from orchestrator.plan.stages import stage_ranks

STATES = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    model: str = "llama3-8b"
    changed: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the model's config that are other than the preset's."""
    parallel: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    lora: Mapping[str, Any] | None = None
    tokens: int = 8192
    micro: int = 1
    passes: int = 1
    masked: bool = False
    """Attention does not cross the ends of documents."""
    slow: bool = False

    @property
    def spec(self) -> JobSpec:
        parallel = {**dict.fromkeys(AXES, 1), "pipeline": {"schedule": "1f1b"}, **self.parallel}
        ranks = parallel["dp_replicate"] * parallel["dp_shard"]
        job: JobSpec = decode(
            JobSpec,
            {
                "name": "memory",
                "model": {"config": {**PRESETS[self.model], **self.changed}, "lora": self.lora},
                "data": {
                    "files": "x",
                    "sequence_length": self.tokens,
                    "document_mask": self.masked,
                },
                "train": {
                    "steps": 1,
                    "global_batch_size": ranks * self.micro * self.passes,
                    "dtype": "bfloat16",
                    "activation_checkpointing": "none",
                    **self.train,
                },
                "parallel": parallel,
            },
        )
        return job

    @property
    def setup(self) -> Setup:
        spec = self.spec
        assert spec.model.config is not None
        kind = spec.train.activation_checkpointing
        assert kind != "auto"
        shape = shape_of(spec.model.config)
        return setup_of(spec, shape, spec.parallel.mesh, self.micro, kind)

    @property
    def config(self) -> TrainingConfig:
        spec = self.spec
        return TrainingConfig(
            model=spec.model,
            data=spec.data,
            train=spec.train,
            parallel=spec.parallel,
            micro_batch_size=self.micro,
            out="run",
        )


FSDP8, FSDP64 = {"dp_shard": 8}, {"dp_shard": 64}
FULL, SELECTIVE, ELEMENTWISE, GATHERS = (
    {"activation_checkpointing": kind} for kind in ("full", "selective", "elementwise", "gathers")
)
ROUNDED = {"optimizer": {"state_dtype": "bfloat16"}}
GPT2 = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
FEW = {"num_hidden_layers": 6}
CELLS: Mapping[str, Cell] = {
    "8b, 8 ranks": Cell(parallel=FSDP8),
    "8b, 8 ranks, full": Cell(parallel=FSDP8, train=FULL),
    "8b, 8 ranks, selective": Cell(parallel=FSDP8, train=SELECTIVE),
    "8b, 8 ranks, elementwise": Cell(parallel=FSDP8, train=ELEMENTWISE),
    "8b, 8 ranks, every 4th": Cell(
        parallel=FSDP8, train={"activation_checkpointing": "every_k", "checkpoint_every": 4}
    ),
    "8b, 8 ranks, 2048 tokens": Cell(parallel=FSDP8, tokens=2048),
    "8b, 8 ranks, 2048 tokens, full": Cell(parallel=FSDP8, tokens=2048, train=FULL),
    "8b, 8 ranks, 512 tokens": Cell(parallel=FSDP8, tokens=512),
    "8b, 8 ranks, 4 micro batches": Cell(parallel=FSDP8, passes=4),
    "8b, 8 ranks, 4 micro batches, reduced last": Cell(
        parallel={**FSDP8, "fsdp": {"reduce_gradients": "last"}}, passes=4
    ),
    "8b, 64 ranks, hsdp, 4 micro batches": Cell(
        parallel={"dp_replicate": 8, "dp_shard": 8}, train=FULL, passes=4
    ),
    "8b, 8 ranks, loss in 1 chunk": Cell(parallel=FSDP8, train={**FULL, "loss_chunks": 1}),
    "8b, 8 ranks, no reshard": Cell(
        parallel={**FSDP8, "fsdp": {"reshard_after_forward": False}}, tokens=2048
    ),
    "8b, 8 ranks, float32": Cell(parallel=FSDP8, train={"dtype": "float32"}, tokens=2048),
    "8b, 64 ranks": Cell(parallel=FSDP64),
    "8b, 64 ranks, full": Cell(parallel=FSDP64, train=FULL),
    "8b, 64 ranks, tp 8": Cell(parallel={"dp_shard": 8, "tp": 8}),
    "8b, 64 ranks, tp 8, full": Cell(parallel={"dp_shard": 8, "tp": 8}, train=FULL),
    "8b, 64 ranks, tp 8, selective": Cell(parallel={"dp_shard": 8, "tp": 8}, train=SELECTIVE),
    "8b, 64 ranks, tp 8, elementwise": Cell(parallel={"dp_shard": 8, "tp": 8}, train=ELEMENTWISE),
    "8b, 64 ranks, tp 8, gathers": Cell(parallel={"dp_shard": 8, "tp": 8}, train=GATHERS),
    "8b, 8 ranks, tp 8": Cell(parallel={"tp": 8}, micro=2),
    "8b, 8 ranks, tp 8, gathers": Cell(parallel={"tp": 8}, micro=2, train=GATHERS),
    "8b, 8 ranks, tp 2, selective": Cell(parallel={"dp_shard": 4, "tp": 2}, train=SELECTIVE),
    "8b, 64 ranks, hsdp": Cell(parallel={"dp_replicate": 8, "dp_shard": 8}, train=FULL),
    "8b, 8 ranks, cp 2": Cell(parallel={"dp_shard": 4, "cp": 2}),
    "8b, 8 ranks, pp 2": Cell(parallel={"dp_shard": 4, "pp": 2}, passes=8, tokens=2048),
    **{
        f"8b, 8 ranks, pp 2, {schedule}": Cell(
            changed={"num_hidden_layers": 8},
            parallel={"dp_shard": 4, "pp": 2, "pipeline": {"schedule": schedule, **more}},
            passes=8,
            tokens=2048,
        )
        for schedule, more in (
            ("gpipe", {}),
            ("interleaved_1f1b", {"stages_per_rank": 2}),
            ("zbv", {"stages_per_rank": 2}),
        )
    },
    "8b, 16 ranks, pp 4, 1f1b": Cell(
        changed={"num_hidden_layers": 16}, parallel={"dp_shard": 4, "pp": 4}, passes=8, tokens=2048
    ),
    "8b, 8 ranks, pp 2, ddp": Cell(
        changed={"num_hidden_layers": 8},
        parallel={"data": "ddp", "dp_replicate": 4, "pp": 2},
        passes=8,
        tokens=2048,
    ),
    "8b, 8 ranks, pp 2, zero1": Cell(
        changed={"num_hidden_layers": 8},
        parallel={"data": "zero1", "dp_replicate": 4, "pp": 2},
        passes=8,
        tokens=2048,
    ),
    "8b, 8 ranks, cp 2, ulysses": Cell(
        parallel={"dp_shard": 4, "cp": 2, "context": "ulysses"}, changed=FEW
    ),
    "8b, 8 ranks, cp 2, all_gather": Cell(
        parallel={"dp_shard": 4, "cp": 2, "context": "all_gather"}, changed=FEW
    ),
    "8b, 8 ranks, offload": Cell(
        parallel={"dp_shard": 8, "fsdp": {"cpu_offload": True}}, changed=FEW, tokens=2048
    ),
    "8b, 8 ranks, nf4": Cell(
        parallel=FSDP8, changed=FEW, tokens=2048, lora={"rank": 16, "quantize": "nf4"}
    ),
    "8b, 8 ranks, nf4, full": Cell(
        parallel=FSDP8, changed=FEW, train=FULL, lora={"rank": 16, "quantize": "nf4"}, tokens=4096
    ),
    "8b, 32 ranks, pp 4, zbv": Cell(
        parallel={"dp_shard": 8, "pp": 4, "pipeline": {"schedule": "zbv"}}, passes=16, tokens=4096
    ),
    "8b, 32 ranks, pp 4, interleaved_1f1b": Cell(
        parallel={"dp_shard": 8, "pp": 4, "pipeline": {"schedule": "interleaved_1f1b"}},
        passes=16,
        tokens=4096,
    ),
    "8b, 1 rank, 6 layers": Cell(changed=FEW, tokens=2048),
    "8b, 1 rank, 6 layers, float32": Cell(changed=FEW, tokens=2048, train={"dtype": "float32"}),
    "8b, 8 ranks, 6 layers, ddp": Cell(
        changed=FEW, tokens=2048, parallel={"data": "ddp", "dp_replicate": 8}
    ),
    "8b, 8 ranks, 6 layers, zero1": Cell(
        changed=FEW, tokens=2048, parallel={"data": "zero1", "dp_replicate": 8}
    ),
    "8b, 8 ranks, 6 layers, ddp, 8192 tokens": Cell(
        changed=FEW, parallel={"data": "ddp", "dp_replicate": 8}
    ),
    **{
        f"8b, 8 ranks, 6 layers, {data}, 8192 tokens, {kind}": Cell(
            changed=FEW,
            parallel={"data": data, "dp_replicate": 8},
            train={"activation_checkpointing": kind},
        )
        for data in ("ddp", "zero1")
        for kind in ("full", "selective")
    },
    "gpt2-large, 8 ranks, ddp": Cell(
        model="gpt2-large",
        changed=GPT2,
        parallel={"data": "ddp", "dp_replicate": 8},
        tokens=1024,
        micro=16,
    ),
    "8b, 8 ranks, 6 layers, ddp, tp 2": Cell(
        changed=FEW, parallel={"data": "ddp", "dp_replicate": 4, "tp": 2}
    ),
    "8b, 8 ranks, 6 layers, ddp, tp 2, gathers": Cell(
        changed=FEW, parallel={"data": "ddp", "dp_replicate": 4, "tp": 2}, train=GATHERS
    ),
    "8b, 16 ranks, pp 2, tp 4, zbv, gathers": Cell(
        changed={"num_hidden_layers": 8},
        parallel={"dp_shard": 2, "pp": 2, "tp": 4, "pipeline": {"schedule": "zbv"}},
        passes=8,
        tokens=2048,
        train=GATHERS,
    ),
    "8b, 8 ranks, 6 layers, zero1, 4 micro batches": Cell(
        changed=FEW, parallel={"data": "zero1", "dp_replicate": 8}, passes=4
    ),
    "8b, 7 ranks, 6 layers, zero1": Cell(
        changed=FEW, tokens=2048, parallel={"data": "zero1", "dp_replicate": 7}
    ),
    **{
        f"8b, 8 ranks, 6 layers, {data}, {how}": Cell(
            changed=FEW, tokens=2048, parallel={"data": data, "dp_replicate": 8}, train=train
        )
        for data in ("ddp", "zero1")
        for how, train in (
            ("reduced in bfloat16", {"reduce_dtype": "bfloat16"}),
            ("bfloat16 moments", ROUNDED),
        )
    },
    "8b, 8 ranks, 2048 tokens, bfloat16 moments": Cell(parallel=FSDP8, tokens=2048, train=ROUNDED),
    "8b, 512 ranks, 512 tokens, bfloat16 moments": Cell(
        parallel={"dp_shard": 512}, tokens=512, train=ROUNDED
    ),
    **{
        f"8b, 8 ranks, 6 layers, cp 2, {context}, {kind}": Cell(
            changed=FEW,
            parallel={"dp_shard": 4, "cp": 2, "context": context},
            train={"activation_checkpointing": kind},
        )
        for context in ("ring", "ulysses")
        for kind in ("elementwise", "selective")
    },
    "8b, 8 ranks, 6 layers, lora, selective": Cell(
        parallel=FSDP8, changed=FEW, train=SELECTIVE, lora={"rank": 16}
    ),
    "gpt2-large, 8 ranks, selective": Cell(
        model="gpt2-large", changed=GPT2, parallel=FSDP8, tokens=1024, micro=4, train=SELECTIVE
    ),
    "8b, 8 ranks, lora": Cell(parallel=FSDP8, lora={"rank": 16}, tokens=2048),
    "qwen3-4b, 8 ranks": Cell(model="qwen3-4b", parallel=FSDP8),
    "qwen3-4b, 8 ranks, full": Cell(model="qwen3-4b", parallel=FSDP8, train=FULL),
    "gpt2-large, 8 ranks": Cell(
        model="gpt2-large", changed=GPT2, parallel=FSDP8, tokens=1024, micro=4
    ),
    "70b, 64 ranks, tp 8, selective": Cell(
        model="llama3-70b", parallel={"dp_shard": 8, "tp": 8}, train=SELECTIVE, slow=True
    ),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    planned: Memory
    states: States
    traced: Traced

    @property
    def error(self) -> float:
        """Of the peak, relative to what was traced."""
        return self.planned.peak_bytes / self.traced.peak - 1

    @property
    def has_exact_states(self) -> bool:
        """To the byte: parameters, gradients and the optimizer's state."""
        planned = self.states.host or {key: getattr(self.states, key) for key in STATES}
        return all(planned[key] == getattr(self.traced, key) for key in STATES)


def compare(cell: Cell) -> Outcome:
    # Of the rank that is told as the fullest; ranks of a stage come one after the other.
    setup, mesh = cell.setup, cell.spec.parallel.mesh
    planned = memory_of(setup, None)
    # On a CPU both are one memory; gradients come later than the peak.
    moved = sum(planned.host[key] for key in ("parameters", "optimizer") if key in planned.host)
    planned = replace(planned, peak_bytes=planned.peak_bytes + moved)
    stage = int(planned.worst_rank.rpartition(" ")[2]) if mesh.pp > 1 else 0
    ranks = stage_ranks(setup.shape, mesh.pp, setup.pipeline, setup.micro_batches, setup.tokens)
    states = states_of(setup, ranks[stage], units_of(setup, ranks[stage]))
    return Outcome(planned, states, traced(cell.config, stage * mesh.world_size // mesh.pp))
