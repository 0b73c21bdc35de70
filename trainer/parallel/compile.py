"""torch.compile of each decoder layer. All layers share one graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from orchestrator.contract.spec.train_spec import BY_OPERATION, Checkpointing
from orchestrator.errors import TrainingError
from trainer.model.decoder import Decoder
from trainer.rank.reporter import Reporter


def compiles_inside_checkpoints(mode: Checkpointing, tp: int, units_inside: bool) -> bool:
    """Whether each checkpoint must hold a compiled layer, because torch 2.13 cannot compile it as
    part of the layer. `units_inside`: FSDP gathers parts of a layer.

    Raises:
        TrainingError: torch compiles no layer either way.
    """
    by_operation = mode in BY_OPERATION
    if by_operation and units_inside:
        raise TrainingError(
            f"train.compile: torch compiles no layer that recomputes by operation ({mode}) if FSDP"
            " gathers its parts",
            fix="set parallel.fsdp.wrap=auto, train.activation_checkpointing=full, or"
            " train.compile=false",
        )
    # torch cannot compile a layer with DTensor weights that recomputes its attention: a random
    # state takes the place of the weights' mesh ("expected all tensors_saved_with_vc_check to be
    # Tensors, got ... DeviceMesh"). By operation it works, because attention is stored. A
    # checkpoint in which hooks of FSDP run is not compiled at all, and torch does not say so.
    return not by_operation and (tp > 1 or units_inside)


def compile_layers(decoder: Decoder, *, inside_checkpoints: bool = False) -> None:
    """With `inside_checkpoints`, recomputation runs a layer's whole compiled forward pass. Without,
    it is compiled too, and leaves out what no gradient needs."""
    for layer in decoder.layers.values():
        inner = layer
        if inside_checkpoints and isinstance(layer, CheckpointWrapper):
            inner = cast(nn.Module, layer._checkpoint_wrapped_module)
        inner.compile()


@contextmanager
def report_compilation(reporter: Reporter) -> Iterator[None]:
    """Report phase `compile` during each compilation. A new shape can cause one in the middle of
    training; it may take minutes, and the agent must not see a hang."""
    from torch._dynamo.callback import callback_handler

    before = reporter.phase

    def started(_: object) -> None:
        nonlocal before
        before = reporter.phase
        reporter.beat("compile")

    def ended(_: object) -> None:
        reporter.beat(before)

    callback_handler.register_start_callback(started)
    callback_handler.register_end_callback(ended)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(started)
        callback_handler.remove_end_callback(ended)
