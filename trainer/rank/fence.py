"""May this rank still make its mark? Asked before each line and each checkpoint."""

from collections.abc import Callable
from functools import partial

from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.fence import check_attempt
from orchestrator.contract.files.run_dir import RunDir

Admit = Callable[[], None]
"""Raises GivenUp when a later attempt has begun, and another OSError when that cannot be told."""


def everybody() -> None:
    """Nobody is kept out."""


def admit_of(run: RunDir, env: RankEnv) -> Admit:
    """Under plain torchrun attempts are not ours to count, and everybody may write."""
    return partial(check_attempt, run.fence, env.attempt) if env.heartbeat_socket else everybody
