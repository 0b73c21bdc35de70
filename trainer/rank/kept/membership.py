"""How a rank leaves an attempt and joins the next one in the same process.

What the rank keeps: its process, the imported modules, and on a GPU the context of the driver. It
drops the model: partners have an older step than its device, so all ranks load the state again,
from memory.
"""

import gc
import logging
import os
import sys
import traceback
from contextlib import ExitStack
from typing import Any

from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.messages.rank_orders import JoinAttempt
from trainer.rank.kept.orders import Orders, break_collectives, forget_groups
from trainer.rank.reporter import Reporter

LOG = logging.getLogger("trainer")

GLOO = "third_party/gloo"
"""In each message of gloo, which names the line of its source."""


def may_leave(exc: Exception, orders: Orders) -> bool:
    """Whether the rank is sound: the agent broke its collectives off, or its peers have. After any
    other exception a new process is safer."""
    if orders.leaving:
        return True
    cause: BaseException | None = exc
    while cause is not None:
        if _is_of_collective(cause):
            return True
        # torch's pipeline stages raise their own error from that of the collective inside.
        cause = cause.__cause__
    return False


def _is_of_collective(exc: BaseException) -> bool:
    module: Any = sys.modules.get("torch.distributed")
    if module is not None and isinstance(exc, module.DistError):
        return True
    return isinstance(exc, RuntimeError) and GLOO in str(exc)


def leave(exc: Exception, reporter: Reporter, on_leave: ExitStack) -> None:
    """Give back what the attempt has used, and tell the agent."""
    break_collectives()  # peers may still wait for this rank, and a save of its own for them
    on_leave.close()
    forget_groups()
    # Frames of the traceback hold the model.
    traceback.clear_frames(exc.__traceback__)
    exc.__traceback__ = exc.__context__ = exc.__cause__ = None
    _forget_compiled()
    gc.collect()
    LOG.info("left attempt %d after step %d", reporter.env.attempt, reporter.step)
    reporter.left()
    reporter.close()


def _forget_compiled() -> None:
    """Compiled code is bound to the modules of the model that is gone. torch keeps what it compiled
    on the disk."""
    module: Any = sys.modules.get("torch._dynamo")
    if module is not None:
        module.reset()


def joined(env: RankEnv, order: JoinAttempt) -> RankEnv:
    """The rank's place in the attempt that it joins. From now on its output goes to that one's log.

    Args:
        env: its former place.
    """
    os.environ.update(order.environ)  # noqa: TID251 (libraries read it)
    new = RankEnv.from_mapping(os.environ)  # noqa: TID251 (the environment of a new attempt)
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    LOG.info("rank %d of attempt %d joins attempt %d", env.rank, env.attempt, new.attempt)
    reporter = Reporter(new)
    reporter.started()
    reporter.close()
    return new
