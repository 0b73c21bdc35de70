"""torch.compile of each decoder layer. All layers share one graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from trainer.model.decoder import Decoder
from trainer.rank.reporter import Reporter


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
