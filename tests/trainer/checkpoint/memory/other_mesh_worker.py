"""Cases of `checkpoint_worker.py` with `attempt` and `memory`, the variable of that name."""

from typing import Any

from msgspec.structs import replace

from orchestrator.contract.files.env import RankEnv
from tests.trainer.checkpoint import checkpoint_worker


def run_case(case: dict[str, Any], env: RankEnv) -> dict[str, Any]:
    env = replace(env, memory=case.get("memory", ""), attempt=case["attempt"], host="a")
    return checkpoint_worker.run_case(case, env)
