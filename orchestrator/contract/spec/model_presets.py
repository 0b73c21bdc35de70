"""Models that a spec may name, as values of their transformers config."""

from collections.abc import Mapping
from typing import Any

LLAMA_3_1: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.0e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
}
"""Common values of the models of "The Llama 3 Herd of Models" (2024). These and all other presets
come from the config.json of the published weights: meta-llama/Llama-3.1-8B, -70B and -405B."""

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
    "llama3-8b": {
        **LLAMA_3_1,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama3-70b": {
        **LLAMA_3_1,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "llama3-405b": {
        **LLAMA_3_1,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
    },
    "qwen3-4b": {  # Qwen/Qwen3-4B
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1.0e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "gpt2-large": {  # openai-community/gpt2-large
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_embd": 1280,
        "n_layer": 36,
        "n_head": 20,
        "n_positions": 1024,
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "layer_norm_epsilon": 1.0e-5,
    },
}
"""`llama-tiny` and `qwen3-tiny` read bytes and train on the CPU of a laptop."""
