"""Starts the user's program in this process, and ends the process as its interpreter would."""

import atexit
import contextlib
import os
import runpy
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ndctl.rank.link import Link, current
from ndctl.rank.saving import CheckpointError
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.env import EXIT_SIGNAL, RankEnv
from orchestrator.contract.files.run_dir import RunDir
from trainer.measure.oom_snapshot import write_if_out_of_memory
from trainer.program.activity import watch
from trainer.program.captured import Captured
from trainer.program.frameworks.hooks import add_to_frameworks
from trainer.program.learned import remember_imports
from trainer.program.names import give_back_names
from trainer.program.step_log import StepLog
from trainer.program.torch_hooks import report_steps
from trainer.rank.evidence.flight import DumpsOnSignal, dump_at_end
from trainer.rank.evidence.stacks import StacksOnSignal

NOT_FOUND = 127
RUNPY = "<frozen runpy>"
"""File name of runpy in tracebacks."""
END_S = 10.0
"""Limit for exit handlers and threads of a program that has failed. They may wait for other ranks,
and the end of this rank is what the agent must report."""


def run(
    workdir: str, run_dir: str, words: Sequence[str], env: RankEnv, captured: Captured | None = None
) -> NoReturn:
    """Run the program `words` in `workdir`. Never returns.

    Args:
        captured: the copy that has the program, if it is not the one in `workdir`.
    """
    try:
        os.chdir(workdir)
    except OSError as exc:
        _leave(f"cannot enter the working directory {workdir}: {exc.strerror}")
    if words[0] == "--no-python":
        _exec(words[1:])
    if captured is not None and not Path(captured.copy).is_dir():
        _leave(f"the copy of the program is not there: {captured.copy}")
    DumpsOnSignal(env)
    StacksOnSignal(env)
    signal.signal(EXIT_SIGNAL, _exit_now)
    link = current()
    link.beat("init")
    log = StepLog(link, RunDir(Path(run_dir)), env)
    report_steps(link, log, first_step=remember_imports)
    add_to_frameworks(link)
    watch(link)
    try:
        _run_python(words, "." if captured is None else captured.copy)
        code = exit_codes.OK
    except SystemExit as exc:
        code = _code_of(exc, link)
    except BaseException as exc:  # noqa: BLE001 - the interpreter also catches all at the top
        code = exit_codes.FAILED
        error = _as_of_script(exc)
        folder = RunDir(Path(run_dir)).profiles(env.attempt)
        cause = _cause(error)
        write_if_out_of_memory(cause, folder, env.rank)
        # The agent gets the error first: the exit handlers below may hang.
        link.raised(cause)
        dump_at_end(env)
        if captured is not None and (advice := captured.advice(exc)):
            sys.stderr.write(f"ndctl: {advice}\n")
        sys.excepthook(type(error), error, error.__traceback__)
    log.close()
    if code == exit_codes.OK and link.stopped:
        # It ended because it was asked to stop, so its training has not finished.
        code = exit_codes.CHECKPOINTED
    _end(link, code)


def _exec(words: Sequence[str]) -> NoReturn:
    try:
        os.execvp(words[0], list(words))
    except OSError as exc:
        _leave(f"cannot start {words[0]}: {exc.strerror}")


def _leave(message: str) -> NoReturn:
    sys.stderr.write(f"ndctl: {message}\n")
    sys.stderr.flush()
    os._exit(NOT_FOUND)


def _exit_now(signum: int, frame: FrameType | None) -> None:
    os._exit(exit_codes.FAILED)


def _run_python(words: Sequence[str], home: str) -> None:
    """As `python SCRIPT` and, in the folder `home`, `python -m MODULE` do, also for the search path
    and `sys.argv`."""
    give_back_names()
    if words[0] == "-m":
        sys.path.insert(0, str(Path(home).absolute()))
        sys.argv = [*words[1:]]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, str(Path(words[0]).absolute().parent))
    sys.argv = [*words]
    runpy.run_path(words[0], run_name="__main__")


def _code_of(exc: SystemExit, link: Link) -> int:
    if exc.code and isinstance(exc.__context__, KeyboardInterrupt):
        # Lightning's Trainer catches Ctrl-C and exits with 1. Most ranks print nothing of it.
        link.raised(exc.__context__)
    if exc.code is None or isinstance(exc.code, int):
        return exc.code or exit_codes.OK
    sys.stderr.write(f"{exc.code}\n")
    return exit_codes.FAILED


def _as_of_script(exc: BaseException) -> BaseException:
    """`exc` with a traceback without the frames of this module and of runpy."""
    whole = tb = exc.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename in (__file__, RUNPY, runpy.__file__):
        tb = tb.tb_next
    # Nothing is left of an error of runpy itself, such as a module that it does not find.
    return exc.with_traceback(tb or whole)


def _cause(exc: BaseException) -> BaseException:
    """What failed on this rank. A failed save is the same CheckpointError on every rank, and has a
    cause only on a rank that raised."""
    return exc.__cause__ or exc if isinstance(exc, CheckpointError) else exc


def _end(link: Link, code: int) -> NoReturn:
    """Do what the interpreter does at its end: join threads, call exit handlers.

    A normal return would instead end in the frames of the process that forked this one.
    """
    link.beat("exit")
    if code != exit_codes.OK:
        # Not a signal handler: the main thread may wait in C code.
        timer = threading.Timer(END_S, os._exit, (code,))
        timer.daemon = True
        timer.start()
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
