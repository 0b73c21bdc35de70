"""Shared by testbeds of schedulers: commands with a time limit, polling of a cluster, and a report
of the tests that could not run."""

import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import pytest

from orchestrator.seams import Completed


class TestbedError(AssertionError):
    """The cluster failed to do what a test needs."""

    __test__ = False


def run_within(argv: Sequence[str], environ: Mapping[str, str], timeout: float) -> Completed:
    """Run a command to its end or kill it. Its output goes to files, because daemons that it starts
    would keep pipes open, and the call would wait for them."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            code = subprocess.run(
                list(argv),
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                timeout=timeout,
                check=False,
            ).returncode
        except FileNotFoundError as exc:
            return Completed(127, "", str(exc))
        except subprocess.TimeoutExpired as exc:
            raise TimeoutError(f"{argv[0]} did not end within {timeout:.0f} s") from exc
        out.seek(0)
        err.seek(0)
        return Completed(code, out.read(), err.read())


def wait_until(what: str, holds: Callable[[], object], timeout: float) -> None:
    """Poll until `holds` is true; an error of a command counts as false. Raises TestbedError."""
    end, last = time.monotonic() + timeout, "it does not hold"
    while time.monotonic() < end:
        try:
            if holds():
                return
        except (TestbedError, TimeoutError) as exc:
            last = str(exc)
        time.sleep(0.1)
    raise TestbedError(f"waited {timeout:.0f} s for {what}: {last}")


def say_what_was_not_run(
    reporter: pytest.TerminalReporter, mark: str, on: str, remedy: str
) -> None:
    """Report at the end which tests were skipped with a reason that contains `mark`, and why.

    `on` is the missing system, for example `Slurm`.
    """
    skipped = [
        (report.nodeid.partition("@")[0], str(report.longrepr[2]))
        for report in reporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple) and mark in str(report.longrepr[2])
    ]
    if not skipped:
        return
    why = skipped[0][1].partition(mark)[2]
    reporter.section(f"{on} was NOT tested", red=True, bold=True)
    reporter.line(f"{len(skipped)} tests on a real {on} were NOT run: {why}")
    for nodeid, _ in skipped:
        reporter.line(f"  not run: {nodeid}")
    reporter.line(f"To run them: {remedy}")
