"""Prevents a rank of an old attempt from writing lines or checkpoints after a newer one started."""

from collections.abc import Callable
from functools import partial

from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.fence import check_attempt
from orchestrator.contract.files.run_dir import RunDir

Admit = Callable[[], None]
"""Called before each write. Raises GivenUp if a later attempt has started, or another OSError if
the fence file cannot be read."""


def admit_all() -> None:
    """Allows every write."""


def admit_of(run: RunDir, env: RankEnv) -> Admit:
    """The fence check of this rank. Without ndctl (plain torchrun) there is no fence."""
    return partial(check_attempt, run.fence, env.attempt) if env.heartbeat_socket else admit_all
