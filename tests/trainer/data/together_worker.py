"""What ranks do together at the start, on real ranks: `python together_worker.py FOLDER`.

Rank r finds in FOLDER/r what its host would have; it writes what it saw to FOLDER/r.json.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from orchestrator.contract.env import RankEnv
from orchestrator.errors import TrainingError
from trainer.data import together
from trainer.data.pack import Progress, Say
from trainer.data.together import wait_for_first
from trainer.data.tokens import TokenFile, read_header
from trainer.ranks import on_all_ranks, process_group


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


def main(folder: Path) -> dict[str, Any]:
    env = RankEnv.from_mapping(os.environ)
    together.PATIENCE_S = 0.1
    with process_group(env):
        beats: Any = Beats()
        here = str(folder / str(env.rank) / "x.tokens")
        first = read_header(str(folder / "0" / "x.tokens"))
        return {
            "answer": wait_for_first(work_and_pause, beats),
            "beats": beats.phases,
            "refused": message_of(lambda: wait_for_first(refuse, beats)),
            "same": message_of(lambda: on_all_ranks(lambda: read_header(here))),
            "other": message_of(lambda: on_all_ranks(lambda: TokenFile(here, first))),
            "missing": message_of(
                lambda: on_all_ranks(lambda: read_header(here if env.rank == 0 else "nowhere"))
            ),
        }


if __name__ == "__main__":
    seen = main(Path(sys.argv[1]))
    (Path(sys.argv[1]) / f"{os.environ['RANK']}.json").write_text(json.dumps(seen))
