"""The real Clock and Shell, and what tells one boot of a machine from the next."""

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.contract.files.env import without_slurm_options
from orchestrator.contract.visible import VisibleStream
from orchestrator.seams import Completed


class SystemClock:
    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def boot_id(file: Path = Path("/proc/sys/kernel/random/boot_id")) -> str:
    """The kernel's id of the last boot of this machine, which its containers have too.

    Returns an empty string on a machine without such a file, as on macOS.
    """
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def log_to_stderr() -> None:
    """Configure the log of a process that runs in the background. Foreign text is made visible."""
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        stream=VisibleStream(sys.stderr),
    )


def run_command(argv: Sequence[str], /, *, timeout: float) -> Completed:
    """The real `Shell`. Variables with a user's options for Slurm's commands are removed, so that
    the commands behave the same for every user."""
    import subprocess  # imported late: every command needs the clock, few start processes

    try:
        done = subprocess.run(
            list(argv),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            env=without_slurm_options(os.environ),
        )
    except OSError as exc:  # the program is missing or may not be run
        return Completed(127, "", str(exc))
    except subprocess.TimeoutExpired as exc:
        raise TimeoutError(f"{argv[0]} did not end within {timeout:.0f} s") from exc
    return Completed(done.returncode, done.stdout, done.stderr)


def run_attached(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command with this terminal and return its exit code; 128 + n if signal n ended it, as a
    shell does, and 127 if there is no such program."""
    import signal
    import subprocess

    try:
        process = subprocess.Popen(list(argv), env=dict(environ))
    except OSError as exc:
        sys.stderr.write(f"{argv[0]}: {exc.strerror}\n")
        return 127
    # Ctrl-C is for the command: it has the same terminal, and decides itself whether it ends.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    return 128 - code if code < 0 else code
