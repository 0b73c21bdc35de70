"""Families from before Llama, whose keys have other names: GPT-2, OPT, BLOOM, Falcon, MPT and more.
`family.py` says what the fields mean.

transformers fuses query, key and value in some of them. Except for GPT-2, which the trainer builds,
they are planned as three projections, because tp can split these.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from orchestrator.plan.model.family import Family, like

ALL_BIASES = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True)
LAYER_NORMS = {"norm_bias": True, "gated": False}
GPT_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
GPT_CALLS = {
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "attention_dropout": "attn_pdrop",
}
GPT2 = Family(
    keys={
        "vocab_size": 50257,
        "n_embd": 768,
        "n_inner": None,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "tie_word_embeddings": True,
        "activation_function": "gelu_new",
        "attn_pdrop": 0.1,
        "resid_pdrop": 0.1,
    },
    traits={
        **ALL_BIASES,
        **LAYER_NORMS,
        **dict.fromkeys(("learned_positions", "fused"), True),
        "residual_dropout": "resid_pdrop",
    },
    names=GPT_NAMES,
    called=GPT_CALLS,
    only={"add_cross_attention": False},
    whole_heads=True,
)
# Attention and MLP share one norm.
GPTJ = like(
    GPT2,
    traits={
        **LAYER_NORMS,
        **dict.fromkeys(("mlp_bias", "head_bias"), True),
        "layer_norms": 1,
        "partial_rotary": True,
        "residual_dropout": "resid_pdrop",
    },
    names=GPT_NAMES,
    called=GPT_CALLS,
    whole_heads=True,
    vocab_size=50400,
    n_embd=4096,
    n_layer=28,
    n_head=16,
    n_positions=2048,
    tie_word_embeddings=False,
    attn_pdrop=0.0,
    resid_pdrop=0.0,
)
CODEGEN = replace(GPTJ, traits={**GPTJ.traits, "one_projection": True}, stores_scores=True)

GPT_LIKE: Mapping[str, Family] = {
    "gpt2": GPT2,
    "gpt-sw3": GPT2,
    "gpt_bigcode": like(
        GPT2,
        traits={key: value for key, value in GPT2.traits.items() if key != "fused"},
        names=GPT_NAMES,
        called=GPT_CALLS,
        only=GPT2.only,
        whole_heads=True,
        activation_function="gelu_pytorch_tanh",
        multi_query=True,
    ),
    "gptj": GPTJ,
    "codegen": CODEGEN,
    "gpt_neo": Family(
        keys={
            "vocab_size": 50257,
            "hidden_size": 2048,
            "intermediate_size": None,
            "num_layers": 24,
            "num_heads": 16,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "activation_function": "gelu_new",
            "attention_dropout": 0.0,
            "resid_dropout": 0.0,
        },
        traits={
            **LAYER_NORMS,
            **dict.fromkeys(("out_bias", "mlp_bias", "learned_positions"), True),
            "residual_dropout": "resid_dropout",
        },
        names={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
        called={"hidden_act": "activation_function"},
        whole_heads=True,
    ),
    "opt": Family(
        keys={
            "vocab_size": 50272,
            "hidden_size": 768,
            "ffn_dim": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "activation_function": "relu",
            "enable_bias": True,
            "attention_dropout": 0.0,
            "dropout": 0.1,
        },
        traits={
            **LAYER_NORMS,
            **dict.fromkeys(ALL_BIASES, "enable_bias"),
            "learned_positions": True,
            "extra_positions": 2,
            "residual_dropout": "dropout",
        },
        called={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        # OPT-350m has other values of the first two.
        only={
            "word_embed_proj_dim": "hidden_size",
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "layer_norm_elementwise_affine": True,
        },
        whole_heads=True,
    ),
    "biogpt": Family(
        keys={
            "vocab_size": 42384,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
            "attention_probs_dropout_prob": 0.1,
            "hidden_dropout_prob": 0.1,
        },
        traits={
            **LAYER_NORMS,
            **ALL_BIASES,
            "learned_positions": True,
            "extra_positions": 2,
            "residual_dropout": "hidden_dropout_prob",
        },
        called={"attention_dropout": "attention_probs_dropout_prob"},
        whole_heads=True,
    ),
    # Its positions are sines, which have no weights.
    "xglm": Family(
        keys={
            "vocab_size": 256008,
            "d_model": 1024,
            "ffn_dim": 4096,
            "num_layers": 24,
            "attention_heads": 16,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "activation_function": "gelu",
            "attention_dropout": 0.1,
            "dropout": 0.1,
        },
        traits={**LAYER_NORMS, **ALL_BIASES, "rotary": False, "residual_dropout": "dropout"},
        names={
            "hidden_size": "d_model",
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "attention_heads",
        },
        called={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        only={"add_cross_attention": False},
        whole_heads=True,
        stores_scores=True,
    ),
    # ALiBi: positions are added to the scores, so sequences have no greatest length.
    "bloom": Family(
        keys={
            "vocab_size": 250880,
            "hidden_size": 64,
            "n_layer": 2,
            "n_head": 8,
            "tie_word_embeddings": True,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        },
        traits={
            **LAYER_NORMS,
            **ALL_BIASES,
            "rotary": False,
            "embedding_norm": True,
            "mlp_values": 2,
            "residual_dropout": "hidden_dropout",
        },
        names={
            "n_embed": "hidden_size",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
        },
        whole_heads=True,
        stores_scores=True,
    ),
    # transformers builds these layers from any config; MPT's own code can build others.
    "mpt": Family(
        keys={
            "vocab_size": 50368,
            "d_model": 2048,
            "n_layers": 24,
            "n_heads": 16,
            "max_seq_len": 2048,
            "tie_word_embeddings": True,
            "attn_config.attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
        },
        traits={
            **dict.fromkeys(("gated", "rotary"), False),
            "bare_layer_norms": True,
            "mlp_values": 2,
            "residual_dropout": "resid_pdrop",
        },
        names={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
        },
        called={
            "max_position_embeddings": "max_seq_len",
            "attention_dropout": "attn_config.attn_pdrop",
        },
        only={
            "expansion_ratio": 4,
            "no_bias": True,
            "norm_type": "low_precision_layernorm",
            "attn_config.attn_type": "multihead_attention",
            "attn_config.qk_ln": False,
            "attn_config.alibi": True,
        },
        whole_heads=True,
        stores_scores=True,
    ),
    "falcon": Family(
        keys={
            "vocab_size": 65024,
            "hidden_size": 4544,
            "ffn_hidden_size": None,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "num_kv_heads": None,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "activation": "gelu",
            "bias": False,
            "alibi": False,
            "multi_query": True,
            "parallel_attn": True,
            "new_decoder_architecture": False,
            "num_ln_in_parallel_attn": None,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        },
        traits={
            **LAYER_NORMS,
            **dict.fromkeys(ALL_BIASES, "bias"),
            "same_input": "parallel_attn",
            "residual_dropout": "hidden_dropout",
        },
        names={"n_embed": "hidden_size"},
        called={
            "intermediate_size": "ffn_hidden_size",
            "num_key_value_heads": "num_kv_heads",
            "hidden_act": "activation",
        },
        whole_heads=True,
    ),
}
