"""What ranks do together at the start, on real ranks.

Rank r finds in `folder`/r what its host would have.
"""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from orchestrator.contract.files.env import RankEnv
from orchestrator.errors import TrainingError
from trainer.data import together
from trainer.data.packing.pack import Progress, Say
from trainer.data.together import wait_for_first
from trainer.data.tokens import TokenFile, read_header
from trainer.rank.ranks import on_all_ranks

PATIENCE_S = 0.1


class Beats:
    def __init__(self) -> None:
        self.phases: list[str] = []

    def beat(self, phase: str) -> None:
        self.phases.append(phase)


def work_and_pause(beats: Beats, say: Say) -> str:
    """Three words of progress, each of which a meeting sees, then a silence, then the answer."""
    for number in range(1, 4):
        say(Progress(number / 3, number))
        while len(beats.phases) < number:
            threading.Event().wait(0.01)
    threading.Event().wait(5 * PATIENCE_S)
    return "done"


def refuse(say: Say) -> str:
    raise TrainingError("no data", fix="give some")


def message_of(act: Any) -> str:
    try:
        act()
    except TrainingError as exc:
        return exc.message
    return ""


def run_case(case: dict[str, Any], env: RankEnv) -> list[dict[str, Any]]:
    """What each rank saw."""
    folder = Path(case["folder"])
    together.PATIENCE_S = PATIENCE_S
    beats: Any = Beats()
    here = str(folder / str(env.rank) / "x.tokens")
    first = read_header(str(folder / "0" / "x.tokens"))
    seen = {
        "answer": wait_for_first(partial(work_and_pause, beats), beats),
        "beats": beats.phases,
        "refused": message_of(lambda: wait_for_first(refuse, beats)),
        "same": message_of(lambda: on_all_ranks(lambda: read_header(here))),
        "other": message_of(lambda: on_all_ranks(lambda: TokenFile(here, first))),
        "missing": message_of(
            lambda: on_all_ranks(lambda: read_header(here if env.rank == 0 else "nowhere"))
        ),
    }
    everybody: list[Any] = [None] * env.world_size
    dist.all_gather_object(everybody, seen)
    return everybody
