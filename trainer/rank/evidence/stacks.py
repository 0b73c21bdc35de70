"""Writes the Python stacks of this rank when its agent asks for them."""

import faulthandler
import os
import sys
from pathlib import Path
from typing import IO

from orchestrator.contract.files.env import STACKS_IN_C, STACKS_SIGNAL, RankEnv
from trainer.rank.evidence.requests import answer_in_thread

BETWEEN_THREADS = "\n\n"
OWN = "Current thread "
"""How faulthandler's text of the thread begins that asks for it."""


class StacksOnSignal:
    """Writes the stacks of all threads at each STACKS_SIGNAL, in a thread. Created once in the
    process.

    faulthandler could do it in a signal handler, also while C code holds the GIL. But then other
    threads may run, and it reads frames that they change: with busy threads a few signals are
    enough to crash the process. So the handler is there only for STACKS_IN_C.
    """

    def __init__(self, env: RankEnv) -> None:
        self.begin(env)
        answer_in_thread(STACKS_SIGNAL, self._answer, "stacks")

    def begin(self, env: RankEnv) -> None:
        """Write to the file of the attempt of `env` from now on."""
        self.out: IO[str] = sys.stderr
        if env.trace_dir:
            folder = Path(env.trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self.out = (folder / f"rank-{env.rank}.stacks").open("a")
        faulthandler.register(STACKS_IN_C, file=self.out, all_threads=True, chain=False)

    def _answer(self) -> None:
        out = self.out
        try:
            out.write(stacks_of_others())
            out.flush()
        except OSError as exc:
            sys.stderr.write(f"failed to write the stacks: {exc}\n")


def stacks_of_others() -> str:
    """The stacks of all threads but the present one, as faulthandler prints them."""
    # In memory first: faulthandler holds the GIL while it writes, and storage may hang.
    with os.fdopen(os.memfd_create("stacks"), "r+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        threads = file.read().decode(errors="replace").strip().split(BETWEEN_THREADS)
    return BETWEEN_THREADS.join(one for one in threads if not one.startswith(OWN)) + "\n"
