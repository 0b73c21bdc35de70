"""Buckets of gradients: their order and size, and buffers that replace gradients without a copy."""

import re

import pytest
import torch
from torch import nn

from orchestrator.contract.spec.model_spec import ModelSpec
from tests.trainer.parallel.parity_cells import deeper
from trainer.model.build import build_stages, read_model_config
from trainer.model.decoder import StageSlice
from trainer.model.init_weights import allocate
from trainer.model.weights import first_weights
from trainer.parallel.buckets import BUCKET_BYTES, bucketed, trained
from trainer.parallel.ddp import flattened
from trainer.parallel.zero1 import Layout, by_rank


def parameters(*sizes: int) -> list[nn.Parameter]:
    """Parameters of these many bytes, without storage."""
    return [nn.Parameter(torch.empty(size // 4, device="meta")) for size in sizes]


def sizes_of(groups: list[list[nn.Parameter]]) -> list[list[int]]:
    return [[parameter.numel() * 4 for parameter in group] for group in groups]


def test_large_parameters_are_alone_and_small_ones_share_a_bucket() -> None:
    large, half, few = BUCKET_BYTES, BUCKET_BYTES // 2, 4096
    found = sizes_of(bucketed(parameters(half, few, large, few, 2 * large, half, half)))
    # From the last parameter to the first, as the backward pass computes their gradients.
    assert found == [[half, half], [2 * large], [large], [few, few, half]]
    assert bucketed([]) == []


@pytest.mark.parametrize("model", ["llama", "qwen3", "gpt2"])
def test_buckets_are_in_the_order_in_which_gradients_are_complete(model: str) -> None:
    """A bucket waits for those before it, so the embedding must not be before a layer."""
    values = read_model_config(ModelSpec(config=deeper(model)))
    (decoder,) = build_stages(values, [StageSlice(0, 4, 4)])
    allocate(decoder, torch.device("cpu"))
    first_weights([decoder], None, 0, resumed=False)
    names = {id(parameter): _part(name) for name, parameter in decoder.named_parameters()}
    complete: list[str] = []
    for parameter in decoder.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: complete.append(names[id(p)]))
    ids = torch.arange(32).unsqueeze(0)
    decoder.set_positions(ids)
    decoder(ids).sum().backward()
    in_buckets = [names[id(parameter)] for parameter in reversed(trained(decoder))]
    assert list(dict.fromkeys(in_buckets)) == list(dict.fromkeys(complete))


def _part(name: str) -> str:
    """The layer, or the kind of module outside the layers."""
    layer = re.search(r"\.(\d+)\.", name)
    return layer[1] if layer else "embedding" if re.search(r"embed|wte|wpe", name) else "end"


def test_a_single_gradient_is_reduced_where_it_is() -> None:
    gradient = torch.arange(24.0).view(6, 4)
    flat, parts = flattened([gradient], torch.float32)
    assert flat.data_ptr() == parts[0].data_ptr() == gradient.data_ptr()
    everyone = by_rank([gradient], Layout([gradient.shape], 3), torch.float32)
    assert everyone.data_ptr() == gradient.data_ptr()
    assert everyone.tolist() == list(range(24))


def test_gradients_of_another_type_or_form_are_copied() -> None:
    gradient = torch.arange(24.0).view(6, 4)
    for given in (gradient.bfloat16(), gradient.t().contiguous().t()):
        flat, parts = flattened([given], torch.float32)
        assert torch.equal(parts[0], gradient)
        assert flat.data_ptr() == parts[0].data_ptr() != given.data_ptr()
    # With four ranks the rows need padding.
    everyone = by_rank([gradient], Layout([gradient.shape], 4), torch.float32)
    assert everyone.tolist() == [*range(24), *[0] * 8]


def test_several_gradients_become_views_of_one_buffer() -> None:
    gradients = [torch.full((2, 3), 1.0), torch.full((5,), 2.0)]
    flat, parts = flattened(gradients, torch.float32)
    flat += 1
    assert [part.tolist() for part in parts] == [[[2.0] * 3] * 2, [3.0] * 5]
    assert [part.untyped_storage().data_ptr() for part in parts] == [flat.data_ptr()] * 2
