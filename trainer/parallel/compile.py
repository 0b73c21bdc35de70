"""torch.compile of each decoder layer. All layers share one graph."""

from collections.abc import Iterator
from contextlib import contextmanager

from trainer.model.decoder import Decoder
from trainer.rank.reporter import Reporter


def compile_layers(decoder: Decoder) -> None:
    for layer in decoder.layers.values():
        layer.compile()


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
