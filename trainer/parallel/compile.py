"""torch.compile of each decoder layer: one graph that all layers share."""

from collections.abc import Iterator
from contextlib import contextmanager

from trainer.model.decoder import Decoder
from trainer.rank.emit import Reporter


def compile_layers(decoder: Decoder) -> None:
    for layer in decoder.layers.values():
        layer.compile()


@contextmanager
def compiling_is_told(reporter: Reporter) -> Iterator[None]:
    """Say so whenever something is compiled, be it in the middle of training: a shape that is new
    may take minutes, and is no hang."""
    from torch._dynamo.callback import callback_handler

    before = reporter.phase

    def begins(_: object) -> None:
        nonlocal before
        before = reporter.phase
        reporter.beat("compile")

    def ends(_: object) -> None:
        reporter.beat(before)

    callback_handler.register_start_callback(begins)
    callback_handler.register_end_callback(ends)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begins)
        callback_handler.remove_end_callback(ends)
