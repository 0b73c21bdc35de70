"""Runs training in a process: signal handlers, the first heartbeat, exit codes for errors.

It does not import torch, which takes seconds: a rank handles signals and refuses a bad
configuration before that.
"""

import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.env import RankEnv
from orchestrator.errors import TrainingError
from trainer.config import complete, load_config
from trainer.data.skip import read_skip
from trainer.guard import Unstable
from trainer.rank.drills import read_drills
from trainer.rank.evidence.flight import DumpsOnSignal, dump_at_end
from trainer.rank.evidence.stacks import StacksOnSignal
from trainer.rank.kept.membership import joined, leave, may_leave
from trainer.rank.kept.orders import Orders
from trainer.rank.reporter import Reporter
from trainer.rank.runtime import Runtime
from trainer.rank.signals import StopRequest

LOG = logging.getLogger("trainer")


def start(arguments: Sequence[str], env: RankEnv) -> int:
    """Train as `arguments` say; returns the process's exit code."""
    dumps, stop = DumpsOnSignal(env), StopRequest()
    stacks = StacksOnSignal(env)  # may wait for storage, so after the handler of SIGTERM
    set_up_logging()
    if len(arguments) != 1:
        LOG.error("usage: python -m trainer CONFIG (one JSON or YAML file)")
        return exit_codes.USAGE
    orders = None if env.place is None else Orders(env)
    path, waits = Path(arguments[0]), env.waits
    while True:
        if orders is not None and waits:
            join = orders.next_join(stop)
            if join is None:
                return exit_codes.FAILED
            env, path, stop = joined(env, join), Path(join.config), StopRequest()
            orders.attempt, dumps.env = env.attempt, env
            stacks.begin(env)
        code = _attempt(path, env, stop, orders)
        if code is not None:
            return code
        waits = True


def _attempt(path: Path, env: RankEnv, stop: StopRequest, orders: Orders | None) -> int | None:
    """Take part in one attempt. Returns the exit code, or None if the rank has left the attempt and
    can join the next one."""
    reporter = Reporter(env)
    reporter.beat("init")
    on_leave = ExitStack()
    try:
        return _train(path, env, reporter, stop, on_leave)
    except TrainingError as exc:
        reporter.raised(exc)
        LOG.error("error: %s", exc)  # on each rank, because the user may read any rank's log
        return exc.exit_code
    except Unstable as exc:
        reporter.raised(exc)
        LOG.error("error: %s", exc)  # without a traceback: the cause is not in the code
        return exit_codes.UNSTABLE
    except Exception as exc:
        reporter.raised(exc)
        dump_at_end(env)
        LOG.exception("rank %d failed at step %d", env.rank, reporter.computing)
        if orders is None or not may_leave(exc, orders):
            return exit_codes.FAILED
        leave(exc, reporter, on_leave)
    return None


def _train(
    path: Path, env: RankEnv, reporter: Reporter, stop: StopRequest, on_leave: ExitStack
) -> int:
    config = complete(load_config(path), env.world_size)
    drills, skip = read_drills(env.drills), read_skip(env.skip)
    clock = time.time  # noqa: TID251 (the entry point passes it on)
    runtime = Runtime(
        env=env,
        reporter=reporter,
        drills=drills,
        stop=stop,
        skip=skip,
        clock=clock,
        # Later a rank may bind itself to a part of them (`rank/host/numa.py`).
        processors=len(os.sched_getaffinity(0)),
        on_leave=on_leave,
    )
    from trainer.imports import train

    return train(config, runtime)


def set_up_logging() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
