"""The parity table: all meshes and methods, which must train as one process does."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.trainer.launch.tiny_runs import LLAMA, MODELS, metrics_of, tiny, work

LOSS, GRAD_NORM = 1e-5, 1e-4
"""Bounds in float32: absolute for the loss, relative for the gradient norm."""
LOSS_BF16, GRAD_NORM_BF16 = 0.06, 0.25
"""Bounds of a model in bfloat16, compared with one process in float32. One process in bfloat16
already differs by 0.042 and 0.17, because the learning rate is high and the model tiny."""
FEW_STEPS, ALL_STEPS = 3, 5
"""The second step shows the first update, the third one the optimizer's moments."""
FEW_LAYERS, ALL_LAYERS = 2, 4
"""A pipeline of two stages with two parts each needs four."""
ROTARY_ONLY = ("llama", "qwen3")
MASKED = ", masked"
OTHERS = ("mistral", "qwen2", "gpt2")


@dataclass(frozen=True, slots=True)
class Difference:
    loss: float
    """Largest absolute difference over the steps."""
    grad_norm: float
    """Largest relative difference over the steps."""

    def within(self, loss: float, grad_norm: float) -> bool:
        """False if a number is NaN."""
        return self.loss <= loss and self.grad_norm <= grad_norm


@dataclass(frozen=True, slots=True)
class Cell:
    name: str
    num_ranks: int
    parallel: dict[str, Any]
    train: tuple[tuple[str, Any], ...] = ()
    """More keys of `train`."""
    models: tuple[str, ...] = ROTARY_ONLY
    rare: bool = False
    """Trained only with all models, in a slow test: cells beside it use the same methods."""

    @property
    def bounds(self) -> tuple[float, float]:
        return (LOSS_BF16, GRAD_NORM_BF16) if in_bfloat16(self) else (LOSS, GRAD_NORM)

    @property
    def limit_s(self) -> float:
        """Time that a training may take beside those of other tests."""
        return 180.0 if ("compile", True) in self.train else 60.0

    @property
    def layers(self) -> int:
        return ALL_LAYERS if self.parallel["pp"] > 1 else FEW_LAYERS

    def config(self, out: Path, model: str, steps: int) -> dict[str, Any]:
        train = {"global_batch_size": batch_of(self.num_ranks), "steps": steps, **dict(self.train)}
        return parity_config(out, model, self.parallel, train, self.layers)


def parity_config(
    out: Path,
    model: str,
    parallel: dict[str, Any],
    train: dict[str, Any],
    layers: int = ALL_LAYERS,
) -> dict[str, Any]:
    """A pipeline gets micro batches of one sequence, so that it has enough of them. A model whose
    name ends in `MASKED` attends inside short documents only.
    """
    readers = parallel.get("dp_replicate", 1) * parallel.get("dp_shard", 1)
    micro = 1 if parallel.get("pp", 1) > 1 or readers == 4 else 2
    config = tiny(out, micro=micro, parallel=parallel, **train)
    if model.endswith(MASKED):
        files = write_documents(out.parent / "documents.jsonl")
        config["data"] = {**config["data"], "files": files, "document_mask": True}
    return {**config, "model": {"config": deeper(model.removesuffix(MASKED), layers)}}


def write_documents(path: Path) -> str:
    """Write documents of 1 to 60 letters; sequences have 32 tokens."""
    rows = (f"{number * 7919} " * (number * number % 12) for number in range(1, 300))
    path.write_text("".join(json.dumps({"text": row[: 1 + len(row) % 60]}) + "\n" for row in rows))
    return str(path)


def deeper(model: str, layers: int = ALL_LAYERS) -> dict[str, Any]:
    known: dict[str, dict[str, Any]] = {
        **MODELS,
        "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": None},
        "qwen2": {**LLAMA, "model_type": "qwen2"},
        "llama with biases": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    }
    if model == "gpt2":
        sizes = {"vocab_size": 256, "n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 64}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return {"model_type": "gpt2", **sizes, **dropout}
    return {**known[model], "num_hidden_layers": layers}


def mesh(name: str = "", **parallel: Any) -> Cell:
    """A cell that is named after its degrees above 1 and the method `name`."""
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    degrees = {axis: parallel.get(axis, 1) for axis in axes}
    shown = " x ".join(f"{axis} {n}" for axis, n in degrees.items() if n > 1)
    parallel = {**degrees, **parallel}
    return Cell(f"{shown}{', ' if name else ''}{name}", math.prod(degrees.values()), parallel)


def with_train(cell: Cell, name: str, models: tuple[str, ...] = ROTARY_ONLY, **train: Any) -> Cell:
    trained = tuple(train.items())
    return replace(cell, name=f"{cell.name}, {name}", train=trained, models=models)


def for_models(cell: Cell, models: tuple[str, ...]) -> Cell:
    return replace(cell, models=models)


def _pipeline(schedule: str, **parallel: Any) -> Cell:
    data = f", {parallel['data']}" if "data" in parallel else ""
    return mesh(f"{schedule}{data}", pp=2, pipeline={"schedule": schedule}, **parallel)


def masked(cell: Cell) -> Cell:
    models = tuple(f"{model}{MASKED}" for model in cell.models)
    return replace(cell, name=f"{cell.name}, document masks", models=models)


def rare(cells: Iterable[Cell]) -> Iterator[Cell]:
    return (replace(cell, rare=True) for cell in cells)


SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zbv")
CONTEXTS = ("ring", "ulysses", "all_gather")
RECOMPUTED = ("full", "selective", "elementwise", "every_k")

TWO: Sequence[Cell] = (
    mesh("ddp", dp_replicate=2, data="ddp"),
    mesh("zero1", dp_replicate=2, data="zero1"),
    mesh("fsdp", dp_replicate=2),
    mesh("fsdp", dp_shard=2),
    mesh("fsdp without reshard", dp_shard=2, fsdp={"reshard_after_forward": False}),
    mesh(tp=2),
    *(mesh(context, cp=2, context=context) for context in CONTEXTS),
    *(_pipeline(schedule) for schedule in SCHEDULES),
    *(
        # Each mode and each mesh is in two common cells.
        replace(
            with_train(cell, f"recompute {mode}", ("llama",), activation_checkpointing=mode),
            rare=(row + column) % 4 > 1,
        )
        for row, mode in enumerate(RECOMPUTED)
        for column, cell in enumerate(
            (mesh(dp_shard=2), mesh(tp=2), mesh("ring", cp=2), _pipeline("1f1b"))
        )
    ),
    with_train(mesh(tp=2), "recompute gathers", activation_checkpointing="gathers"),
    *(
        with_train(cell, "bfloat16", ("llama", "qwen3"), dtype="bfloat16")
        for cell in (
            mesh("fsdp", dp_shard=2),
            mesh("ddp", dp_replicate=2, data="ddp"),
            mesh(tp=2),
            mesh("ring", cp=2),
            _pipeline("1f1b"),
        )
    ),
    *(
        for_models(cell, OTHERS)
        for cell in (mesh("fsdp", dp_shard=2), mesh("ring", cp=2), _pipeline("1f1b"))
    ),
    for_models(mesh(tp=2), ("llama with biases", "mistral", "qwen2")),
    *(
        with_train(cell, "loss in 5 chunks", loss_chunks=5)
        for cell in (mesh("ddp", dp_replicate=2, data="ddp"), mesh(tp=2), _pipeline("gpipe"))
    ),
)
FOUR: Sequence[Cell] = (
    mesh(dp_replicate=2, dp_shard=2),
    mesh("reshard to 2", dp_shard=4, fsdp={"reshard_after_forward": 2}),
    mesh(dp_replicate=2, tp=2),
    mesh(dp_shard=2, tp=2),
    mesh("ddp", dp_replicate=2, cp=2, data="ddp"),
    mesh("zero1", dp_replicate=2, cp=2, data="zero1"),
    mesh("ring", dp_replicate=2, cp=2),
    *(mesh(context, dp_shard=2, cp=2, context=context) for context in ("ring", "all_gather")),
    mesh("ulysses", cp=2, tp=2, context="ulysses"),
    *rare([mesh("ulysses", dp_shard=2, cp=2, context="ulysses")]),
    *rare(mesh(context, cp=2, tp=2, context=context) for context in ("ring", "all_gather")),
    *rare([mesh("ring", cp=4)]),
    *(_pipeline(schedule, dp_shard=2) for schedule in ("gpipe", "zbv")),
    *rare(_pipeline(schedule, dp_shard=2) for schedule in ("1f1b", "interleaved_1f1b")),
    mesh(
        "1f1b, gradients reduced last",
        pp=2,
        dp_shard=2,
        pipeline={"schedule": "1f1b"},
        fsdp={"reduce_gradients": "last"},
    ),
    *rare([_pipeline("1f1b", dp_replicate=2)]),
    _pipeline("1f1b", dp_replicate=2, data="ddp"),
    *rare([_pipeline("zbv", dp_replicate=2, data="zero1")]),
    *(_pipeline(schedule, tp=2) for schedule in ("1f1b", "interleaved_1f1b")),
    *rare(_pipeline(schedule, tp=2) for schedule in ("gpipe", "zbv")),
    with_train(_pipeline("zbv", tp=2), "recompute gathers", activation_checkpointing="gathers"),
    *rare([_pipeline("1f1b", cp=2)]),
    _pipeline("interleaved_1f1b", cp=2),
    *rare([mesh("1f1b", pp=4)]),
)
EIGHT: Sequence[Cell] = (
    mesh(dp_replicate=2, dp_shard=2, tp=2),
    mesh("ring", dp_replicate=2, dp_shard=2, cp=2),
    mesh("ring", dp_replicate=2, cp=2, tp=2),
    mesh("ring", dp_shard=2, cp=2, tp=2),
    mesh("ulysses", dp_shard=2, cp=2, tp=2, context="ulysses"),
    _pipeline("1f1b", dp_shard=2, tp=2),
    _pipeline("interleaved_1f1b", dp_shard=2, tp=2),
    _pipeline("zbv", dp_shard=2, tp=2),
    _pipeline("1f1b", dp_shard=2, cp=2),
    _pipeline("1f1b", cp=2, tp=2),
    _pipeline("1f1b", dp_replicate=2, dp_shard=2),
    with_train(
        mesh("ring", dp_shard=2, cp=2, tp=2),
        "recompute selective",
        ("llama",),
        activation_checkpointing="selective",
    ),
)
Table = Mapping[int, Sequence[Cell]]
"""World size -> cells, no two of one name: each has a run directory of that name."""
WITH_MASKS: Table = {
    2: [
        masked(for_models(cell, models))
        for models, cells in (
            (
                ("llama",),
                (
                    mesh("zero1", dp_replicate=2, data="zero1"),
                    mesh(tp=2),
                    *(mesh(context, cp=2, context=context) for context in CONTEXTS),
                    *(_pipeline(schedule) for schedule in ("1f1b", "zbv")),
                    *rare(_pipeline(schedule) for schedule in ("gpipe", "interleaved_1f1b")),
                    *rare(
                        with_train(cell, f"recompute {mode}", activation_checkpointing=mode)
                        for mode in ("full", "selective")
                        for cell in (mesh(dp_shard=2), mesh("ring", cp=2))
                    ),
                ),
            ),
            (("gpt2",), (mesh("ddp", dp_replicate=2, data="ddp"), mesh("ring", cp=2))),
        )
        for cell in cells
    ],
    4: [
        masked(cell)
        for cell in (
            mesh("ring", cp=4),
            *rare([mesh("all_gather", cp=4, context="all_gather")]),
            *rare([mesh("ulysses", cp=2, tp=2, context="ulysses")]),
            _pipeline("1f1b", cp=2),
        )
    ],
}
TABLE: Table = {2: [*TWO, *WITH_MASKS[2]], 4: [*FOUR, *WITH_MASKS[4]], 8: EIGHT}


def compiled(cell: Cell) -> Cell:
    changes = {**dict(cell.train), "compile": True}
    return replace(with_train(cell, "compiled", cell.models, **changes), rare=False)


def can_compile(cell: Cell) -> bool:
    pipeline = cell.parallel.get("pipeline", {})
    return pipeline.get("schedule") != "zbv"


COMPILED: Table = {
    ranks: [compiled(cell) for cell in cells if can_compile(cell)] for ranks, cells in TABLE.items()
}


def in_bfloat16(cell: Cell) -> bool:
    return ("dtype", "bfloat16") in cell.train


ALL_MASKED: Table = {
    ranks: [masked(cell) for cell in cells if not in_bfloat16(cell)]
    for ranks, cells in ((2, TWO), (4, FOUR), (8, EIGHT))
}
"""Every cell of the table with document masks."""
COMPILED_MASKED: Table = {
    ranks: [compiled(cell) for cell in cells if can_compile(cell)]
    for ranks, cells in WITH_MASKS.items()
}


Sized = tuple[str, int]
"""A model and its number of layers."""


def in_turn(models: Sequence[str], turn: int) -> Sequence[str]:
    """One of `models`, which changes with each `turn`."""
    return (models[turn % len(models)],)


def batch_of(num_ranks: int) -> int:
    """Sequences of a step, so that a two-stage pipeline with data ranks has two micro batches."""
    return max(4, num_ranks)


def train_one_process(
    folder: Path, models: Sequence[Sized], batch: int = 4, steps: int = ALL_STEPS
) -> dict[Sized, Path]:
    """Train the reference of the cells on one process; model and layers -> run directory."""
    outs = {one: folder / f"one {one[0]} of {one[1]}" for one in models}
    train = {"global_batch_size": batch, "steps": steps}
    cases = [parity_config(out, model, {}, train, n) for (model, n), out in outs.items()]
    work(folder, 1, [unsaved(case) for case in cases])
    return outs


def unsaved(config: dict[str, Any]) -> dict[str, Any]:
    """A case that writes no checkpoint, because that would take half of its time."""
    return {"config": config, "unsaved": True}


def measure(
    folder: Path, num_ranks: int, *, all_models: bool, table: Table = TABLE
) -> Iterator[tuple[Cell, str, Difference]]:
    """Train the cells of the table for `num_ranks` in order on the same ranks: each with all of its
    models, or those that are not rare with one model in turn and fewer steps."""
    steps = ALL_STEPS if all_models else FEW_STEPS
    pairs = [
        (cell, model)
        for turn, cell in enumerate(c for c in table[num_ranks] if all_models or not c.rare)
        for model in (cell.models if all_models else in_turn(cell.models, turn))
    ]
    models = sorted({(model, cell.layers) for cell, model in pairs})
    expected = train_one_process(folder, models, batch_of(num_ranks), steps)
    outs = [folder / f"{cell.name} {model}" for cell, model in pairs]
    cases = [
        unsaved(cell.config(out, m, steps)) for (cell, m), out in zip(pairs, outs, strict=True)
    ]
    work(folder, num_ranks, cases, timeout=120 + sum(cell.limit_s for cell, _ in pairs))
    for (cell, model), out in zip(pairs, outs, strict=True):
        yield cell, model, difference(out, expected[model, cell.layers])


def difference(out: Path, reference: Path, steps: int | None = None) -> Difference:
    """Difference between two runs, over the first `steps` steps if given."""
    pairs = list(zip(metrics_of(out), metrics_of(reference), strict=True))[:steps]
    return Difference(
        loss=_largest(abs(a["loss"] - b["loss"]) for a, b in pairs),
        grad_norm=_largest(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in pairs),
    )


def _largest(values: Iterator[float]) -> float:
    """The largest value, or NaN if one is NaN, which `max` would ignore."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)
