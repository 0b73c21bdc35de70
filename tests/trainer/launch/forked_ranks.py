"""Ranks that are forked from a process which has already imported torch and the trainer.

Importing takes a rank longer than most multi-rank tests take. Agents fork their ranks too.
"""

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from orchestrator.agent.processes.exec_in_fork import become, find_name
from orchestrator.contract.files.env import RankEnv
from orchestrator.run_module import FLAGS
from trainer.process import set_up_logging

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["tests.trainer.launch.preloaded_imports"])


def run_forked(
    worker: str,
    folder: Path,
    cases: Sequence[dict[str, Any]],
    environments: Sequence[Mapping[str, str]],
    timeout: float,
) -> list[Any]:
    """Start one rank per environment. Each runs `cases` in order; the answers of rank 0.

    `worker` is a module with `run_case(case, env) -> answer`. The output of the ranks goes to
    `ranks-<n>.log` in `folder`.
    """
    answers, log = folder / "answers.json", folder / f"ranks-{len(environments)}.log"
    answers.unlink(missing_ok=True)
    log.write_text("")
    ranks = [
        FORKING.Process(target=_serve, args=(worker, cases, answers, dict(env), log), daemon=True)
        for env in environments
    ]
    for rank in ranks:
        rank.start()
    ended, in_time = _exit_codes(ranks, timeout)
    # Ranks that lose a killed one raise errors of lost connections, which say nothing of the cause.
    why = "" if in_time else f"the ranks were killed after {timeout:.0f} s; their output:\n"
    assert ended == [0] * len(ranks), why + log.read_text()
    found: list[Any] = json.loads(answers.read_text())
    return found


def start_forked(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    *,
    has_children: bool = False,
) -> BaseProcess:
    """Start `python -m module arguments` in a fork, as an agent starts a rank; its output goes to
    `log`. `multiprocessing` gives only a process that is no daemon children of its own."""
    words = (module, *arguments)
    rank = FORKING.Process(
        target=_become, args=(words, dict(environment), log), daemon=not has_children
    )
    rank.start()
    return rank


def _become(words: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    _write_to(log)
    find_name()
    command = [sys.executable, *FLAGS, *words]
    become(command, environment, title=" ".join(words), parent=os.getppid(), lock=log)


def _write_to(log: Path) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(fd, sys.stdout.fileno())
    os.dup2(fd, sys.stderr.fileno())
    os.close(fd)


def _exit_codes(ranks: Sequence[BaseProcess], timeout: float) -> tuple[list[int | None], bool]:
    """The exit codes, and whether the ranks ended before `timeout`. The other ranks are killed when
    one fails or when time is up."""
    until = time.monotonic() + timeout
    in_time = True
    while left := [rank for rank in ranks if rank.exitcode is None]:
        in_time = time.monotonic() < until
        if not in_time or any(rank.exitcode for rank in ranks):
            break
        left[0].join(0.2)
    for rank in ranks:
        rank.join(0.5)
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks], in_time


def _end_with_parent() -> None:
    """End this rank when its parent ends, so that a killed test leaves no ranks running."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _serve(
    worker: str, cases: Sequence[dict[str, Any]], answers: Path, env: dict[str, str], log: Path
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(env)
    _write_to(log)
    module = import_module(worker)
    from trainer.rank.ranks import process_group

    rank = RankEnv.from_mapping(os.environ)
    set_up_logging()
    with process_group(rank):
        done = [module.run_case(case, rank) for case in cases]
    if rank.rank == 0:
        answers.write_text(json.dumps(done))
