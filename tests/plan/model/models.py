"""Models for tests of the planner, as values of their config.json."""

from typing import Any

from orchestrator.contract.spec.model_presets import PRESETS

TINY: dict[str, Any] = dict(PRESETS["llama-tiny"])
LLAMA3_8B: dict[str, Any] = dict(PRESETS["llama3-8b"])
QWEN2_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
MISTRAL_7B: dict[str, Any] = {
    "model_type": "mistral",
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
}
MIXTRAL_8X7B: dict[str, Any] = {"model_type": "mixtral", "max_position_embeddings": 32768}
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
TINY_GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_embd": 128,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 256,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
TINY_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
