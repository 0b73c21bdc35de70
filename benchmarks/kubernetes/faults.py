"""What happens to a job on Kubernetes at each fault: one row of a table per fault.

    python -m benchmarks.kubernetes.faults [FAULT...]

A PyTorchJob of 2 hosts x 2 ranks, a checkpoint every ten steps, on a real API server, scheduler and
controller manager; operator and kubelets are stand-ins. Seconds are counted from the fault to the
first step of the next attempt, or between two steps if the attempt survives. `lost` are steps that
were repeated, and `left` are processes that remain after the job was cancelled. A repeated step
must have the same loss, bit by bit.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from benchmarks.jobs.local import redone
from benchmarks.measure.timing import machine
from tests.e2e.job import processes_of, wait_for
from tests.kubernetes.e2e.kube_job import KubeNdctl, job_on
from tests.kubernetes.standins.nodes import Shape
from tests.kubernetes.testbed import KubeTestbed, running_testbed

AWAY_S = SUSPENDED_S = 25.0
LIMIT_S = 300.0
ENDLESS = {
    "train__steps": "100000",
    "checkpoint__every_steps": "10",
    "resilience__agent_timeout": "10",
    "cluster__kubernetes__force_delete_after": "3",
}
SPARE = {"cluster__spare_hosts": "1"}
Fault = Callable[[KubeNdctl], object]


def other(job: KubeNdctl) -> str:
    """A host of ranks whose agent does not lead."""
    return next(host for host in job.hosts() if host != job.leader())


def kill_rank(job: KubeNdctl) -> None:
    os.kill(job.rank_pid(1), signal.SIGKILL)


def kill_agent(job: KubeNdctl) -> None:
    os.kill(job.pids(other(job))[0], signal.SIGKILL)


def kill_leader(job: KubeNdctl) -> None:
    os.kill(job.pids(job.leader())[0], signal.SIGKILL)


def delete_pod(job: KubeNdctl) -> None:
    job.kubectl("delete", "pod", job.pod_of(other(job)), "--wait=false")


def evict_leader(job: KubeNdctl) -> None:
    job.testbed.evict(job.pod_of(job.leader()), job.namespace)


def lose_other_node(job: KubeNdctl) -> None:
    job.testbed.lose_node(other(job))


def lose_first_node(job: KubeNdctl) -> None:
    job.testbed.lose_node(job.leader())


def drain(job: KubeNdctl) -> None:
    job.kubectl("drain", other(job), "--force", "--ignore-daemonsets", "--delete-emptydir-data")


def control_plane_away(job: KubeNdctl) -> None:
    job.testbed.stop_control_plane()
    time.sleep(AWAY_S)
    job.testbed.start_control_plane()


def suspend(job: KubeNdctl) -> None:
    for suspended in ("true", "false"):
        patch = f'{{"spec": {{"runPolicy": {{"suspend": {suspended}}}}}}}'
        job.kubectl("patch", "pytorchjob", "e2e", "--type=merge", "-p", patch)
        if suspended == "true":
            time.sleep(SUSPENDED_S)


FAULTS: dict[str, tuple[str, Fault, dict[str, str], float]] = {
    "rank": ("kill -9 of a rank", kill_rank, {}, 0.0),
    "agent": ("kill -9 of a pod's first process", kill_agent, {}, 0.0),
    "leader": ("the same in the leader's pod", kill_leader, {}, 0.0),
    "pod": ("a pod is deleted", delete_pod, {}, 0.0),
    "evict": ("the leader's pod is evicted", evict_leader, {}, 0.0),
    "drain": ("a node is drained", drain, {}, 0.0),
    "spare": ("a node is lost, with a spare", lose_other_node, SPARE, 0.0),
    "other": ("a node is lost", lose_other_node, {}, 0.0),
    "first": ("the leader's node is lost", lose_first_node, {}, 0.0),
    "away": (f"the API server is away for {AWAY_S:.0f} s", control_plane_away, {}, AWAY_S),
    "suspend": (f"suspended, resumed after {SUSPENDED_S:.0f} s", suspend, {}, SUSPENDED_S),
}
COLUMNS = ("fault", "outcome", "culprit", "s", "restarts", "lost steps", "same losses", "left")


def main(names: list[str]) -> None:
    print(machine())
    with running_testbed(Shape(nodes=5)) as testbed:
        print(f"{testbed.version}, load {os.getloadavg()[0]:.1f} before")
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
        for name in names or FAULTS:
            what, fault, options, lasts_s = FAULTS[name]
            testbed.restore()
            cells = suffered(testbed, fault, options, lasts_s)
            print(f"| {what} | {' | '.join(cells)} |", flush=True)


def suffered(
    testbed: KubeTestbed, fault: Fault, options: dict[str, str], lasts_s: float
) -> list[str]:
    """`lasts_s` of the fault itself are no part of the seconds."""
    with job_on(testbed, testbed.runs) as job:
        job.submit_successfully("--new", **ENDLESS, **options)
        job.wait_until("a checkpoint", lambda: job.has_started() and job.events("CheckpointSaved"))
        begun, now = time.perf_counter(), time.time()
        fault(job)
        known = job.num_steps()
        try:
            wait_for(lambda: went_on(job, known, lasts=fault is control_plane_away), "", LIMIT_S)
            seconds = f"{time.perf_counter() - begun - lasts_s:.1f}"
        except AssertionError:
            seconds = "-"
        if fault is control_plane_away:
            seconds = f"{longest_gap(job, now):.1f}"
        told = about(job)
        job.output_of("cancel", "e2e")
        left = processes_of(job.run_dir)
    return [*told[:2], seconds, *told[2:], str(len(left)) if left else "none"]


def went_on(job: KubeNdctl, known: int, *, lasts: bool) -> bool:
    """A step was done after the fault; of a later attempt, unless the present one `lasts`."""
    return job.num_steps() > known if lasts else any(line["attempt"] > 1 for line in job.metrics())


def longest_gap(job: KubeNdctl, since: float) -> float:
    """Between two steps, in seconds: a job that goes on as it was has no first new step."""
    times: list[float] = [line["time"] for line in job.metrics() if line["time"] >= since]
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


def about(job: KubeNdctl) -> list[str]:
    """Outcome, culprits, restarts that count, steps done twice and whether alike."""
    leaders = len(job.events("LeaderStarted"))
    attempts = len(job.started_attempts())
    outcome = "goes on as it was" if attempts == 1 else "next attempt"
    outcome += ", another leader" if leaders > 1 else ""
    status: dict[str, Any] = job.status()
    culprits = [culprit_of(incident["culprit"]) for incident in status["incidents"]]
    twice, alike = redone(job.metrics())
    return [
        outcome,
        "; ".join(culprits) or "nobody",
        str(status["restarts"]),
        str(twice),
        "yes" if alike else "NO",
    ]


def culprit_of(culprit: dict[str, Any]) -> str:
    if culprit["host"] is None:
        return "none"
    rank = culprit["rank"]
    return culprit["host"] if rank is None else f"rank {rank} on {culprit['host']}"


if __name__ == "__main__":
    main(sys.argv[1:])
