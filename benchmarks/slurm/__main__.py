"""What ndctl takes on Slurm, as multiples of what Slurm's own way takes in the same run.

    python -m benchmarks.slurm [RUNS [LOOKS [LOSSES]]]

Recovery: RUNS times in turn, on one testbed of 4 nodes x 2 whose requeued jobs wait as long as by
Slurm's defaults (`cred_expire=120`), the same training as 2 hosts of 2 ranks under ndctl with a
spare, and as a batch job that runs torchrun by srun and asks for `scontrol requeue` when that
fails. A rank is killed, a rank is stopped, a node is killed; figures are printed as they come.

Lost nodes: LOSSES times in turn, on another testbed with Slurm's default KillWait, a job of 2 hosts
x 1 rank loses a node and is queued again: the batch job by Slurm (`sbatch --requeue`), ndctl's by
ndctl. Then ndctl's with a spare, which stays in its allocation.

Inventory: LOOKS times, a slurmctld with 10,000 nodes of 8 GPUs and no slurmd's, read as `ndctl
inventory --backend slurm` reads it. Limit: 1 s with the commands.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from benchmarks.jobs.local import rank_pid
from benchmarks.jobs.slurm import (
    LOSS,
    NODE_FAIL_S,
    SMALL,
    Job,
    nodes_of,
    requeued_by_slurm,
    state_of,
    under_ndctl,
    wait_for,
)
from benchmarks.measure.timing import machine, ratio, spread
from orchestrator.backends.slurm.commands import Slurm
from orchestrator.backends.slurm.inventory import NODES, TOPOLOGY, read_cluster
from orchestrator.inventory.slurm.gpus import gpu_table
from orchestrator.inventory.slurm.inventory import Use
from orchestrator.system import SystemClock, run_command
from tests.slurm.testbed import SlurmTestbed, running_testbed

INVENTORY = Path(__file__).parents[2] / "slurm" / "testbed" / "slurm_inventory.sh"
NODE_COUNT, GPUS = 10_000, 8
LIMIT_S = 1.0


CRED_EXPIRE_S = 120
"""Slurm's default; a requeued job waits a second longer than that before it may start."""

Times = dict[str, list[float]]
FIGURES = (
    ("submit to first step", "submit", "plain submit", "at most 1.2"),
    ("  without the hosts' check", "bare submit", "plain submit", ""),
    ("rank killed: noticed", "kill seen", "plain kill seen", ""),
    ("  to the first new step", "kill step", "plain kill step", "at most 0.2"),
    ("  less Slurm's wait of 121 s", "kill step", "plain kill step less wait", ""),
    ("rank stopped: noticed", "stop seen", "", ""),
    ("  to the first new step", "stop step", "", ""),
    ("node killed: noticed", "node seen", "plain node seen", ""),
    ("  to the first new step, on a spare", "node step", "", ""),
)


LOSSES = (
    ("the first node, where the leader or the script is", "first", "plain first", "at most 1.3"),
    ("another node", "other", "plain other", "at most 1.3"),
    ("  with a spare", "spare", "plain other", ""),
)


def main(runs: int, looks: int, losses: int) -> None:
    print(machine())
    if looks:
        inventory(looks)
    if runs:
        recovery(runs)
    if losses:
        lost_nodes(losses)


def lost_nodes(runs: int) -> None:
    times: Times = {}
    with running_testbed(nodes=4, gpus=2, knobs=LOSS) as testbed:
        print(f"{testbed.output_of('sinfo', '--version')}, load {os.getloadavg()[0]:.1f} before")
        for _ in range(runs):
            for name, seconds in losses_in_turn(testbed):
                times.setdefault(name, []).append(seconds)
                print(f"  {name} {seconds:.2f} s", flush=True)
    print("node killed, to the first new step")
    _compare(LOSSES, times, width=52)


def losses_in_turn(testbed: SlurmTestbed) -> Iterator[tuple[str, float]]:
    spare = "--set=cluster.spare_hosts=1"
    for name, place in (("other", 1), ("first", 0)):
        with tempfile.TemporaryDirectory() as folder:
            testbed.restore()
            alone = requeued_by_slurm(testbed, Path(folder), *SMALL, gpus=1, patience_s=NODE_FAIL_S)
            with alone as job:
                yield f"plain {name}", _lost(testbed, job, place)
        with tempfile.TemporaryDirectory() as folder:
            testbed.restore()
            with under_ndctl(testbed, Path(folder), *SMALL) as job:
                yield name, _lost(testbed, job, place)
    with tempfile.TemporaryDirectory() as folder:
        testbed.restore()
        with under_ndctl(testbed, Path(folder), *SMALL, spare) as job:
            yield "spare", _lost(testbed, job, 1)


def _lost(testbed: SlurmTestbed, job: Job, place: int) -> float:
    """Seconds from the death of the job's node at this place to its first new step."""
    job.await_step()
    job.await_checkpoint()
    node = nodes_of(testbed, job)[place]
    begun = time.perf_counter()
    testbed.kill_node(node)
    # No step is done without that node's rank: what there is now is all of the first attempt.
    return job.await_step(since=job.steps) - begun


def recovery(runs: int) -> None:
    times: Times = {}
    knobs = {"TB_CRED_EXPIRE": str(CRED_EXPIRE_S)}
    with running_testbed(nodes=4, gpus=2, knobs=knobs) as testbed:
        print(f"{testbed.output_of('sinfo', '--version')}, load {os.getloadavg()[0]:.1f} before")
        for _ in range(runs):
            for name, seconds in chain(starts(testbed), plain(testbed), ours(testbed)):
                times.setdefault(name, []).append(seconds)
                print(f"  {name} {seconds:.2f} s", flush=True)
    _compare(FIGURES, times)


def _compare(figures: Sequence[tuple[str, str, str, str]], times: Times, width: int = 36) -> None:
    for what, mine, theirs, limit in figures:
        print(f"{what:<{width}} {spread(times[mine], 's')}", end="")
        if theirs:
            both = {"ndctl": times[mine], "Slurm": times[theirs]}
            print(f"   Slurm {spread(times[theirs], 's')}", end="")
            print(f"   ndctl / Slurm {ratio(both, 'ndctl', 'Slurm')}", end="")
        print(f"   target {limit}" if limit else "")


def ours(testbed: SlurmTestbed) -> Iterator[tuple[str, float]]:
    """Seconds to each thing, of a job that suffers one failure after the other."""
    testbed.restore()
    spare = "--set=cluster.spare_hosts=1"
    with tempfile.TemporaryDirectory() as folder, under_ndctl(testbed, Path(folder), spare) as job:
        job.await_step()
        job.await_checkpoint()
        yield from _broken(job, "kill", 1, signal.SIGKILL, "RankExited")
        job.await_checkpoint()
        # On the other host: one that is the culprit twice would be left out.
        yield from _broken(job, "stop", 3, signal.SIGSTOP, "HangDetected")
        job.await_checkpoint()
        yield from _node_killed(testbed, job)


def starts(testbed: SlurmTestbed) -> Iterator[tuple[str, float]]:
    """On as many hosts as the batch job has, where these try each other first and where not."""
    for name, preflight in (("submit", "true"), ("bare submit", "false")):
        testbed.restore()
        wish = f"--set=resilience.preflight={preflight}"
        with (
            tempfile.TemporaryDirectory() as folder,
            under_ndctl(testbed, Path(folder), wish) as job,
        ):
            yield name, job.await_step() - job.begun


def _broken(
    job: Job, name: str, rank: int, number: signal.Signals, kind: str
) -> Iterator[tuple[str, float]]:
    known, attempts = len(job.events(kind)), len(job.events("TrainingResumed"))
    begun = time.perf_counter()
    os.kill(rank_pid(job.folder, rank), number)
    yield f"{name} seen", job.await_event(kind, known) - begun
    job.await_event("TrainingResumed", attempts)
    yield f"{name} step", job.await_step(since=job.steps) - begun


def _node_killed(testbed: SlurmTestbed, job: Job) -> Iterator[tuple[str, float]]:
    """Of a node that ranks are on but not the leader; seen by ndctl and by Slurm."""
    leader = job.events("LeaderStarted")[-1]["host"]
    node = next(host for host in job.placement() if host != leader)
    known, attempts = len(job.events("AgentLost")), len(job.events("TrainingResumed"))
    begun = time.perf_counter()
    testbed.kill_node(node)
    with ThreadPoolExecutor(1) as beside:
        down = beside.submit(wait_for, lambda: testbed.node_state(node).startswith("down"))
        yield "node seen", job.await_event("AgentLost", known) - begun
        job.await_event("TrainingResumed", attempts)
        yield "node step", job.await_step(since=job.steps) - begun
        yield "plain node seen", down.result() - begun


def plain(testbed: SlurmTestbed) -> Iterator[tuple[str, float]]:
    """The same of a batch job, as far as Slurm notices anything."""
    testbed.restore()
    with tempfile.TemporaryDirectory() as folder, requeued_by_slurm(testbed, Path(folder)) as job:
        yield "plain submit", job.await_step() - job.begun
        job.await_checkpoint()
        begun = time.perf_counter()
        os.kill(rank_pid(job.folder, 1), signal.SIGKILL)
        left = wait_for(lambda: state_of(testbed, job) != "RUNNING")
        yield "plain kill seen", left - begun
        known = job.steps
        again = wait_for(lambda: state_of(testbed, job) == "RUNNING")
        new = job.await_step(since=known)
        yield "plain kill step", new - begun
        yield "plain kill step less wait", new - begun - min(CRED_EXPIRE_S + 1.0, again - left)


def inventory(looks: int) -> None:
    times = inventory_times(looks)
    print(f"inventory of {NODE_COUNT:,} nodes x {GPUS} GPUs")
    for name, values in times.items():
        print(f"  {name:<40} {spread([1e3 * value for value in values], 'ms', 0)}")
    print(
        f"  ours over the commands alone: {ratio(times, 'ndctl: commands and reading', COMMANDS)}"
    )
    middle = statistics.median(times["ndctl: commands and reading"])
    print(f"  limit {LIMIT_S:.0f} s: {'held' if middle <= LIMIT_S else 'NOT held'}")


COMMANDS = "scontrol show nodes, show topology"
CPU = "  of it on a core"


def inventory_times(runs: int) -> Times:
    times: Times = {COMMANDS: [], "ndctl: commands and reading": [], CPU: []}
    with many_nodes():
        for _ in range(runs):
            begun = time.perf_counter()
            for argv in (NODES, TOPOLOGY):
                subprocess.run(argv, stdout=subprocess.DEVNULL, check=True)
            times[COMMANDS].append(time.perf_counter() - begun)
            begun, worked = time.perf_counter(), sum(os.times()[:4])
            found = read_cluster(Slurm(run_command, SystemClock()), None, whole=True).inventory(
                gpu_table({}), Use()
            )
            times["ndctl: commands and reading"].append(time.perf_counter() - begun)
            times[CPU].append(sum(os.times()[:4]) - worked)
            assert len(found.hosts) == NODE_COUNT
            assert all(host.devices == GPUS and len(host.switches) == 3 for host in found.hosts)
    return times


@contextmanager
def many_nodes() -> Iterator[None]:
    """A slurmctld alone, which SLURM_CONF then names."""
    with tempfile.TemporaryDirectory(prefix="ndctl-slurm-bench-") as folder:
        before: Mapping[str, str] = dict(os.environ)
        os.environ["SLURM_CONF"] = f"{folder}/etc/slurm.conf"
        try:
            start = [str(INVENTORY), "start", folder, str(NODE_COUNT), str(GPUS)]
            subprocess.run(start, stdout=subprocess.DEVNULL, check=True, timeout=120)
            yield
        finally:
            subprocess.run([str(INVENTORY), "stop", folder], check=True, timeout=120)
            os.environ.clear()
            os.environ.update(before)


if __name__ == "__main__":
    main(*map(int, [*sys.argv[1:], *("3", "10", "3")[len(sys.argv) - 1 :]]))
