"""The modules that ranks of tests import. They are imported once, before ranks are forked.

A module that starts a thread must not be imported here, because a fork does not copy threads.
"""

from trainer.imports import hidden

with hidden("torchao"):
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama
    import transformers.models.mistral.modeling_mistral
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import tests.trainer.launch.training_worker  # noqa: F401
