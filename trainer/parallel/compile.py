"""torch.compile of each decoder layer: one graph that all layers share."""

from trainer.model.decoder import Decoder


def compile_layers(decoder: Decoder) -> None:
    for layer in decoder.layers.values():
        layer.compile()
