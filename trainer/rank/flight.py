"""Writes this rank's flight-recorder dump when its agent asks for it, as at a hang."""

import json
import logging
import pickle
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.files.env import DUMP_SIGNAL, RankEnv
from orchestrator.contract.files.run_dir import FLIGHT_FILES, LAST_FILES

LOG = logging.getLogger("trainer")
RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")
"""torch's, of NCCL and of gloo; a build without CUDA has the second alone."""
LAST_CALLS = 128
"""Operations that a rank writes down as it ends: some 30 KB, for all ranks end where one does."""
LAST_WORDS_S = 2.0
"""Storage that does not answer may be why it ends, and must not keep it."""


def dump_on_signal(env: RankEnv) -> None:
    """From now on DUMP_SIGNAL has a thread of its own write the dump.

    The signal is blocked while there is no other thread, so the one that waits for it takes it,
    whatever the main thread is stuck in: collectives let go of the GIL. Where something holds the
    GIL for good, nothing written in Python can answer: NCCL's monitor then does, at its pipe
    (`trainer/rank/environment.py`), and a dump of gloo is missing.
    """
    if not env.trace_dir:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {DUMP_SIGNAL})
    signal.signal(DUMP_SIGNAL, signal.SIG_DFL)
    path = Path(env.trace_dir) / f"{FLIGHT_FILES}{env.rank}"
    threading.Thread(target=_answer, args=(path,), name="flight-dump", daemon=True).start()


def _answer(path: Path) -> None:
    while True:
        signal.sigwait({DUMP_SIGNAL})
        try:
            write_dump(path)
        except Exception:
            LOG.exception("the flight recorder could not be dumped to %s", path)


def dump_at_end(env: RankEnv, limit_s: float = LAST_WORDS_S) -> None:
    """What this rank called last, for whoever asks why it ended by an exception.

    On gloo ranks whose operations do not fit each other end instead of hanging, and the one that
    cannot write this is told apart by what its peers wrote.
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
    except Exception as exc:  # noqa: BLE001 (why the rank ends is what matters, whatever this says)
        LOG.warning("what was called last could not be written to %s: %s", path, exc)


def write_dump(path: Path) -> None:
    """At once under its name, so nobody reads half of it. Stacks of each operation are left out:
    they are most of its size, and SIGUSR2 shows where a rank is."""
    write_whole(path, _dump())


def _dump() -> bytes:
    """Of the recorder that holds more: a job has operations of NCCL or of gloo, seldom of both.

    Before torch is there the rank has called nothing, and that is what its dump says.
    """
    module: Any = sys.modules.get("torch._C._distributed_c10d")
    ask = [getattr(module, name) for name in RECORDERS if hasattr(module, name)]
    dumps = [bytes(dump(True, False, False)) for dump in ask]
    return max(dumps, key=len, default=json.dumps({"entries": []}).encode())
