"""All families of models that can be planned, by `model_type`.

A family without a class in transformers, such as `kimi_k2`, has the keys of the one that its model
is built with.
"""

from collections.abc import Mapping

from orchestrator.plan.model.dense_families import DENSE
from orchestrator.plan.model.expert_families import WITH_EXPERTS
from orchestrator.plan.model.family import Family
from orchestrator.plan.model.gpt_families import GPT_LIKE

FAMILIES: Mapping[str, Family] = {**DENSE, **WITH_EXPERTS, **GPT_LIKE}
