"""What ranks do together at the start, on real ranks.

Rank r finds in `folder`/r what its host would have.
"""

import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist

from orchestrator.contract.env import RankEnv
from orchestrator.errors import TrainingError
from trainer.data import together
from trainer.data.pack import Progress, Say
from trainer.data.together import wait_for_first
from trainer.data.tokens import TokenFile, read_header
from trainer.ranks import on_all_ranks


class Beats:
    def __init__(self) -> None:
        self.phases: list[str] = []

    def beat(self, phase: str) -> None:
        self.phases.append(phase)


def work_and_pause(say: Say) -> str:
    """Three words of progress, then a silence, then the answer."""
    for number in range(3):
        say(Progress(number / 3, number))
        threading.Event().wait(0.3)
    threading.Event().wait(1.0)
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
    together.PATIENCE_S = 0.1
    beats: Any = Beats()
    here = str(folder / str(env.rank) / "x.tokens")
    first = read_header(str(folder / "0" / "x.tokens"))
    seen = {
        "answer": wait_for_first(work_and_pause, beats),
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
