"""The tasks that ranks do together at the start of a training, on real ranks.

`folder`/r has the files of the host of rank r.
"""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from orchestrator.contract.files.env import RankEnv
from orchestrator.errors import TrainingError
from trainer.data import rank0_task
from trainer.data.packing.pack import OnProgress, Progress
from trainer.data.rank0_task import run_on_rank0
from trainer.data.tokens import TokenFile, read_header
from trainer.rank.ranks import on_all_ranks

POLL_S = 0.1


class Beats:
    def __init__(self) -> None:
        self.phases: list[str] = []

    def beat(self, phase: str) -> None:
        self.phases.append(phase)


def work_and_pause(beats: Beats, report: OnProgress) -> str:
    """Report progress three times, wait for a beat each time, then pause, then answer."""
    for number in range(1, 4):
        report(Progress(number / 3, number))
        while len(beats.phases) < number:
            threading.Event().wait(0.01)
    threading.Event().wait(5 * POLL_S)
    return "done"


def refuse(report: OnProgress) -> str:
    raise TrainingError("no data", fix="give some")


def message_of(act: Any) -> str:
    try:
        act()
    except TrainingError as exc:
        return exc.message
    return ""


def run_case(case: dict[str, Any], env: RankEnv) -> list[dict[str, Any]]:
    """Run the tasks; the results of each rank."""
    folder = Path(case["folder"])
    rank0_task.POLL_S = POLL_S
    beats: Any = Beats()
    here = str(folder / str(env.rank) / "x.tokens")
    first = read_header(str(folder / "0" / "x.tokens"))
    seen = {
        "answer": run_on_rank0(partial(work_and_pause, beats), beats),
        "beats": beats.phases,
        "refused": message_of(lambda: run_on_rank0(refuse, beats)),
        "same": message_of(lambda: on_all_ranks(lambda: read_header(here))),
        "other": message_of(lambda: on_all_ranks(lambda: TokenFile(here, first))),
        "missing": message_of(
            lambda: on_all_ranks(lambda: read_header(here if env.rank == 0 else "nowhere"))
        ),
    }
    results: list[Any] = [None] * env.world_size
    dist.all_gather_object(results, seen)
    return results
