"""How long `ndctl list` takes, and how much memory, with many jobs in the user's index.

    python -m benchmarks.many_jobs [JOBS]

The jobs are in 100 run roots, as of many projects, and have all ended: a third was cancelled.
The first `list` reads every journal. A later one reads the kept summaries, and looks whether the
files of each job are as they were.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure.timing import machine
from orchestrator.contract.messages.events import (
    CancelRequested,
    CheckpointSaved,
    Event,
    HostStopped,
)
from orchestrator.journal.journal import to_line
from orchestrator.registry.store import register
from orchestrator.registry.submitted import entry_of
from tests.dashboard.dashboard_story import START, finished, journal, recovered, submitted
from tests.web.served_jobs import line

JOBS = 10_000
ROOTS = 100
STEPS = 200
SAVES = 20


def main(jobs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "HOME": folder, "XDG_STATE_HOME": f"{folder}/state"}
        environ.pop("NDCTL_RUN_ROOT", None)
        environ.pop("NDCTL_INDEX", None)
        write_jobs(Path(folder), jobs, environ)
        print(machine())
        print(f"{jobs:,} jobs in {ROOTS} run roots")
        ndctl = str(Path(sys.executable).with_name("ndctl"))
        commands = {
            "list, the first": ["list", "--all"],
            "list, later": ["list", "--all"],
            "list --json": ["list", "--json"],
            "list 'job-77*'": ["list", "job-77*"],
            "status job-77, from any folder": ["status", "job-77"],
        }
        for name, arguments in commands.items():
            seconds, most = measured([ndctl, *arguments], folder, environ)
            print(f"{name:<32} {seconds:6.2f} s  {most >> 20:>5} MiB")


def write_jobs(folder: Path, jobs: int, environ: dict[str, str]) -> None:
    """Run directories with journals and metrics, and an entry in the index for each."""
    stories = [story(finished()), story(cancelled()), story(finished())]
    lines = (json.dumps(line(number), separators=(",", ":")) for number in range(1, STEPS + 1))
    metrics = "".join(f"{text}\n" for text in lines)
    for number in range(jobs):
        run_dir = folder / f"project-{number % ROOTS}" / "ndctl-runs" / f"job-{number}"
        run_dir.mkdir(parents=True)
        text = stories[number % 3]
        (run_dir / "journal.jsonl").write_bytes(text)
        (run_dir / "metrics.jsonl").write_text(metrics)
        register(entry_of(submitted(), run_dir, START + number), environ)


def cancelled() -> list[Event]:
    stopped = [
        HostStopped(at=START + 61, attempt=2, host=host, finished=False)
        for host in ("host-0", "host-1")
    ]
    return [*recovered(), CancelRequested(at=START + 60, by="alice"), *stopped]


def story(events: list[Event]) -> bytes:
    saves = [CheckpointSaved(at=START + 40, attempt=2, step=20 + n) for n in range(1, SAVES)]
    return b"".join(map(to_line, journal([*events[:-2], *saves, *events[-2:]])))


def measured(command: list[str], folder: str, environ: dict[str, str]) -> tuple[float, int]:
    """Seconds, and bytes of the largest resident memory."""
    begun = time.perf_counter()
    running = subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(running.pid, 0)
    seconds = time.perf_counter() - begun
    running.returncode = os.waitstatus_to_exitcode(status)
    assert running.returncode == 0, command
    return seconds, used.ru_maxrss << 10


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else JOBS)
