"""What a rank of a test imports, to be imported once before ranks are forked.

Nothing that is imported here may start a thread.
"""

from trainer.imports import hidden

with hidden("torchao"):
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama
    import transformers.models.mistral.modeling_mistral
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import tests.trainer.trainer_worker  # noqa: F401
