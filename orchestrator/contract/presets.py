"""Models that a spec may call by name, as transformers config values."""

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama-tiny": {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1.0e-5,
        "tie_word_embeddings": False,
    },
    "qwen3-tiny": {
        "model_type": "qwen3",
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1.0e-6,
        "tie_word_embeddings": True,
    },
}
"""`llama-tiny` and `qwen3-tiny` read bytes and train on a laptop's CPU."""
