"""The fence check of a rank."""

from ndctl.rank.fence import Admit, admit_all, admit_attempt
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.run_dir import RunDir


def admit_of(run: RunDir, env: RankEnv) -> Admit:
    """The fence check of this rank. Without ndctl (plain torchrun) there is no fence."""
    return admit_attempt(run.fence, env.attempt) if env.heartbeat_socket else admit_all
