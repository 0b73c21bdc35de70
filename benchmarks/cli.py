"""How quickly the command line answers, as multiples of `python -c pass` in the same run.

    python -m benchmarks.cli [RUNS]

Limits: `ndctl --help` 4x, `ndctl status` 8x, `ndctl plan` for 8 hosts 12x.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure.timing import machine, spread
from orchestrator.app.planning import plans
from orchestrator.app.submission import payload
from orchestrator.contract.mesh import AXES
from orchestrator.contract.messages.events import AgentRegistered, LeaderStarted, StepReached
from orchestrator.journal.journal import Journal
from orchestrator.journal.supervisor import Supervisor
from orchestrator.system import SystemClock

SPEC = Path("examples/quickstart.yaml")
LIMITS = {"--help": 4.0, "status": 8.0, "plan": 12.0}


def main(runs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_job(root)
        ndctl = [str(Path(sys.executable).with_name("ndctl"))]
        commands = {
            "pass": [sys.executable, "-c", "pass"],
            "--help": [*ndctl, "--help"],
            "status": [*ndctl, "status", "quickstart", "--run-root", folder],
            "plan": [*ndctl, "plan", str(SPEC), "--set=cluster.hosts=8", *EIGHT_HOSTS],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(runs):
            for name, command in commands.items():
                times[name].append(timed(command))
    report(times)


EIGHT_HOSTS = (
    "--set=cluster.gpus_per_host=2",
    "--set=train.global_batch_size=64",
    *(f"--set=parallel.{axis}=auto" for axis in AXES),  # the search is what is measured
)


def write_job(root: Path) -> None:
    """A job in its run directory as `status` finds it: submitted, started, at a step."""
    planned = plans.plan_spec(SPEC, (), {})
    clock = SystemClock()
    submission = payload.Submission(planned=planned, run_root=root)
    run_dir = submission.run_dir
    run_dir.logs.mkdir(parents=True)
    with Journal(run_dir.journal, clock) as journal:
        supervisor = Supervisor(journal)
        supervisor.feed(payload.submitted_event(submission, supervisor.run, clock.now()))
        supervisor.feed(LeaderStarted(at=clock.now(), host="host-0", pid=1))
        for host in planned.plan.hosts:
            supervisor.feed(
                AgentRegistered(
                    at=clock.now(),
                    host=host,
                    address="127.0.0.1",
                    devices=2,
                    pid=1,
                    incarnation="1",
                )
            )
        supervisor.feed(
            StepReached(at=clock.now(), attempt=1, step=1, loss=5.0, tokens_per_second=1e4)
        )


def timed(command: list[str]) -> float:
    begun = time.perf_counter()
    # Without a timeout: with one, Python polls for the end, up to 50 ms too late.
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begun


def report(times: dict[str, list[float]]) -> None:
    base = times.pop("pass")
    print(machine())
    print(f"{'python -c pass':<16} {spread([1e3 * t for t in base], 'ms')}")
    for name, values in times.items():
        pairs = [value / one for value, one in zip(values, base, strict=True)]
        middle = statistics.median(pairs)
        verdict = "within" if middle <= LIMITS[name] else "ABOVE"
        print(
            f"{'ndctl ' + name:<16} {spread([1e3 * t for t in values], 'ms')}"
            f"  {middle:.1f}x, {verdict} the limit of {LIMITS[name]:.0f}x"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
