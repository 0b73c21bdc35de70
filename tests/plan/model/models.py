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

DEEPSEEK_V3: dict[str, Any] = {"model_type": "deepseek_v3"}
DEEPSEEK_V2: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 160,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
}
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
}
KIMI_K2: dict[str, Any] = {
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
}
QWEN15_MOE_A27B: dict[str, Any] = {"model_type": "qwen2_moe"}
OLMOE_1B_7B: dict[str, Any] = {
    "model_type": "olmoe",
    "intermediate_size": 1024,
}
GPT_OSS_120B: dict[str, Any] = {"model_type": "gpt_oss"}
GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "num_local_experts": 32,
}
GLM_4_5: dict[str, Any] = {
    "model_type": "glm4_moe",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 92,
    "head_dim": 128,
    "n_routed_experts": 160,
    "first_k_dense_replace": 3,
    "attention_bias": True,
    "use_qk_norm": True,
}
MIXTRAL_8X22B: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_hidden_layers": 56,
    "num_attention_heads": 48,
}
QWEN3_235B_A22B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "head_dim": 128,
}
LLAMA4_SCOUT: dict[str, Any] = {"model_type": "llama4_text"}
LLAMA4_MAVERICK: dict[str, Any] = {
    "model_type": "llama4_text",
    "num_local_experts": 128,
    "interleave_moe_layer_step": 2,
}
ERNIE_21B_A3B: dict[str, Any] = {"model_type": "ernie4_5_moe"}
PHI_3_5_MOE: dict[str, Any] = {
    "model_type": "phimoe",
    "attention_bias": True,
    "lm_head_bias": True,
}
OPT_1_3B: dict[str, Any] = {
    "model_type": "opt",
    "hidden_size": 2048,
    "ffn_dim": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "word_embed_proj_dim": 2048,
    "do_layer_norm_before": True,
}
OPT_350M: dict[str, Any] = {
    "model_type": "opt",
    "hidden_size": 1024,
    "ffn_dim": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "word_embed_proj_dim": 512,
    "do_layer_norm_before": False,
}
BLOOM: dict[str, Any] = {
    "model_type": "bloom",
    "n_embed": 14336,
    "n_layer": 70,
    "num_attention_heads": 112,
    "seq_length": 2048,
}
FALCON_7B: dict[str, Any] = {"model_type": "falcon", "multi_query": True, "parallel_attn": True}
FALCON_40B: dict[str, Any] = {
    "model_type": "falcon",
    "hidden_size": 8192,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_kv_heads": 8,
    "new_decoder_architecture": True,
}
FALCON_11B: dict[str, Any] = {
    "model_type": "falcon",
    "hidden_size": 4096,
    "ffn_hidden_size": 16384,
    "num_attention_heads": 32,
    "num_hidden_layers": 60,
    "num_kv_heads": 8,
    "num_ln_in_parallel_attn": 1,
    "new_decoder_architecture": True,
    "tie_word_embeddings": False,
}
FALCON_RW_1B: dict[str, Any] = {
    "model_type": "falcon",
    "vocab_size": 50304,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 24,
    **dict.fromkeys(("multi_query", "parallel_attn"), False),
    **dict.fromkeys(("alibi", "bias"), True),
}
MPT_7B: dict[str, Any] = {
    "model_type": "mpt",
    "vocab_size": 50432,
    "d_model": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "expansion_ratio": 4,
    "no_bias": True,
    "attn_config": {"alibi": True, "attn_type": "multihead_attention", "attn_pdrop": 0},
}
STARCODER: dict[str, Any] = {
    "model_type": "gpt_bigcode",
    "vocab_size": 49152,
    "n_embd": 6144,
    "n_head": 48,
    "n_inner": 24576,
    "n_layer": 40,
    "n_positions": 8192,
    "multi_query": True,
}
GPT_NEO_2_7B: dict[str, Any] = {
    "model_type": "gpt_neo",
    "hidden_size": 2560,
    "num_heads": 20,
    "num_layers": 32,
    "attention_types": [[["global", "local"], 16]],
}
PYTHIA_12B: dict[str, Any] = {
    "model_type": "gpt_neox",
    "vocab_size": 50688,
    "hidden_size": 5120,
    "intermediate_size": 20480,
    "num_attention_heads": 40,
    "num_hidden_layers": 36,
}
APERTUS_8B: dict[str, Any] = {
    "model_type": "apertus",
    "intermediate_size": 21504,
    "num_key_value_heads": 8,
}
BITNET_2B: dict[str, Any] = {"model_type": "bitnet", "tie_word_embeddings": True}
HUNYUAN_A13B: dict[str, Any] = {
    "model_type": "hunyuan_v1_moe",
    "vocab_size": 128167,
    "intermediate_size": 3072,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 64,
    "moe_topk": [8] * 32,
    "moe_intermediate_size": [3072] * 32,
    "num_shared_expert": [1] * 32,
    "tie_word_embeddings": True,
}
MINIMAX_M2: dict[str, Any] = {"model_type": "minimax_m2"}
