"""What the table says of a family: the keys of its `config.json`, and in what its layers differ
from Llama's."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Literal

from msgspec import Struct

Trait = bool | int | str
NONE: Mapping[str, Any] = MappingProxyType({})


class Family(Struct, frozen=True, kw_only=True):
    keys: Mapping[str, Any]
    """Keys that its class reads, with the defaults of transformers 5 after its constructor ran. A
    key of a nested section has its place: `attn_config.alibi`."""
    traits: Mapping[str, Trait] = NONE
    """Fields of `ModelShape` that differ from Llama's: a value, or the key that has it."""
    qk_norm: Literal["", "head", "all", "biased"] = ""
    """Queries and keys have norms: one for all heads with the size of a head, with or without
    biases, or with that of all heads. A key `use_qk_norm` or `qk_layernorm` switches them."""
    names: Mapping[str, str] = NONE
    """Other names that transformers accepts for its keys (`attribute_map`)."""
    called: Mapping[str, str] = NONE
    """Llama's names of keys that this family calls otherwise and whose names transformers does not
    accept."""
    only: Mapping[str, Any] = NONE
    """Keys that change what a model is made of, and the only value that can be planned. A string is
    the key that has the value, or the value itself if there is no such key."""
    whole_heads: bool = False
    """`hidden_size` must be a multiple of the number of heads."""
    stores_scores: bool = False
    """transformers has only an attention for it that stores the scores of all pairs of tokens."""


def like(  # noqa: PLR0913 - one argument for each field of a family
    base: Family,
    *,
    traits: Mapping[str, Trait] = NONE,
    qk_norm: Literal["", "head", "all", "biased"] = "",
    names: Mapping[str, str] = NONE,
    called: Mapping[str, str] = NONE,
    only: Mapping[str, Any] = NONE,
    whole_heads: bool = False,
    without: Collection[str] = (),
    **keys: Any,
) -> Family:
    """A family with the keys of `base` and its own; nothing else is inherited."""
    kept = {key: value for key, value in base.keys.items() if key not in without}
    return Family(
        keys={**kept, **keys},
        traits=traits,
        qk_norm=qk_norm,
        names=names,
        called=called,
        only=only,
        whole_heads=whole_heads,
    )
