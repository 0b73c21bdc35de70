"""Writes the flight recorder dump of this rank, when its agent asks for it and before a crash."""

import json
import logging
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.files.env import DUMP_SIGNAL, RankEnv
from orchestrator.contract.files.run_dir import FLIGHT_FILES, LAST_FILES
from trainer.rank.evidence.requests import answer_in_thread

LOG = logging.getLogger("trainer")
RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")
"""Functions of torch for NCCL and for gloo. A build without CUDA has only the second."""
LAST_CALLS = 128
"""Operations in the dump before a crash: about 30 KB, because all ranks write at the same time."""
LAST_WORDS_S = 2.0
"""Time limit of that dump: storage that hangs may be the cause of the crash."""


class DumpsOnSignal:
    """Writes the dump at each DUMP_SIGNAL, in a thread. Created once in the process.

    While C code holds the GIL, NCCL's monitor answers at its pipe instead
    (`trainer/rank/environment.py`), and a gloo dump is missing.
    """

    def __init__(self, env: RankEnv) -> None:
        self.env = env
        """The rank's place in its present attempt."""
        if env.trace_dir:
            answer_in_thread(DUMP_SIGNAL, self._answer, "flight-dump")

    def _answer(self) -> None:
        path = Path(self.env.trace_dir) / f"{FLIGHT_FILES}{self.env.rank}"
        try:
            write_dump(path)
        except Exception:
            LOG.exception("failed to dump the flight recorder to %s", path)


def dump_at_end(env: RankEnv, limit_s: float = LAST_WORDS_S) -> None:
    """Write the last collectives of a rank that ends with an exception.

    With gloo, ranks with mismatched collectives crash instead of hanging. The dumps show the
    culprit, even if the culprit itself wrote none (`diagnosis/hang/post_mortem.py`).
    """
    if env.trace_dir and "torch._C._distributed_c10d" in sys.modules:
        path = Path(env.trace_dir) / f"{LAST_FILES}{env.rank}"
        writing = threading.Thread(target=_write_last, args=(path,), daemon=True)
        writing.start()
        writing.join(limit_s)


def _write_last(path: Path) -> None:
    try:
        dump = pickle.loads(_dump())
        dump["entries"] = dump["entries"][-LAST_CALLS:]
        write_whole(path, pickle.dumps(dump))
    except Exception as exc:  # noqa: BLE001 (must not hide the exception that ends the rank)
        LOG.warning("failed to write the last collectives to %s: %s", path, exc)


def write_dump(path: Path) -> None:
    """Write atomically, so that no reader sees half a dump.

    It has no stack per operation: these are most of its size, and `stacks.py` writes them.
    """
    write_whole(path, _dump())


def _dump() -> bytes:
    """The larger dump of NCCL's and gloo's recorders: a job rarely uses both.

    Before torch is imported no operation was called, so the dump is empty.
    """
    module: Any = sys.modules.get("torch._C._distributed_c10d")
    ask = [getattr(module, name) for name in RECORDERS if hasattr(module, name)]
    dumps = [bytes(dump(True, False, False)) for dump in ask]
    return max(dumps, key=len, default=json.dumps({"entries": []}).encode())
