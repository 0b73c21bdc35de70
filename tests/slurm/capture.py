"""Captures output of this machine's Slurm for test fixtures: `python -m tests.slurm.capture DIR`.

It runs every command that ndctl reads, on testbeds in the states that are described below. Use it
for a version of Slurm that has no fixtures yet.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.backends.slurm.inventory import NODES, PARTITIONS, TOPOLOGY
from orchestrator.backends.slurm.observe import SQUEUE_FORMAT
from tests.slurm.testbed import (
    FIRST_WITH_BLOCKS,
    FIRST_WITH_TOPOLOGY_YAML,
    SlurmTestbed,
    running_testbed,
    slurm_version,
)

COMMENT = "ndctl launch 1 of /shared/runs/a b; JobState=FAILED a|b"
UNKNOWN = "999999"
SITE = "Prolog=/bin/true\nEpilog=/bin/true\nPreemptType=preempt/partition_prio\nPreemptMode=REQUEUE"
TOPOLOGIES = """\
- topology: switched
  cluster_default: true
  tree:
    switches:
      - {switch: leaf1, nodes: "node[1-2]"}
      - {switch: leaf2, nodes: "node[3-8]"}
      - {switch: spine, children: "leaf[1-2]"}
- topology: nvlink
  block:
    block_sizes: [2, 4]
    blocks:
      - {block: b1, nodes: "node[1-2]"}
      - {block: b2, nodes: "node[3-4]"}
      - {block: b3, nodes: "node[5-6]"}
      - {block: b4, nodes: "node[7-8]"}
- topology: round
  ring:
    rings:
      - {ring: r1, nodes: "node[1-8]"}
- topology: pod
  torus3d:
    toruses:
      - name: t1
        dims: {x: 2, y: 2, z: 2}
        nodes: "node[1-8]"
        placements:
          - dims: {x: 2, y: 1, z: 1}
- topology: plain
  flat: true"""
PARTED = (
    "PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
    "PartitionName=short Nodes=node[5-6] MaxTime=01:30:00 MaxNodes=1 State=DRAIN"
)
SHOW_JOBS = ("scontrol", "show", "job", "-a", "-o")
QUEUE = ("squeue", "-h", "-a", "--states=all", "-o", SQUEUE_FORMAT)


@dataclass(frozen=True, slots=True)
class Capture:
    slurm: SlurmTestbed
    into: Path

    def capture_output(self, name: str, *argv: str) -> None:
        self.write(name, self.slurm.output_of(*argv) + "\n")

    def capture_results(self, name: str, asked: Sequence[Sequence[str]]) -> None:
        """Writes the output and exit code of each command."""
        output = []
        for argv in asked:
            done = self.slurm(list(argv))
            output.append({"argv": [*argv], "code": done.code, "out": done.out, "err": done.err})
        self.write(name, json.dumps(output, indent=1) + "\n")

    def write(self, name: str, text: str) -> None:
        (self.into / name).write_text(text.replace(str(self.slurm.folder), "/tmp/tb"))

    @property
    def script(self) -> str:
        return str(self.slurm.folder / "job.sh")

    def submit(self, *args: str) -> str:
        """Submits a job that sleeps, or runs the shell command in `args` after the script."""
        argv = ("sbatch", "--parsable", "-o/dev/null", "--chdir=/tmp", *args)
        return self.slurm.output_of(*argv, *(() if self.script in args else (self.script,)))

    def wait_until(self, job: str, state: str) -> None:
        asked = ("squeue", "-h", "-t", "all", "-o", "%T", "-j", job)
        self.slurm.wait_for(f"{job} {state}", lambda: self.slurm.output_of(*asked) == state, 150)

    def running(self, *args: str) -> str:
        job = self.submit(*args)
        self.wait_until(job, "RUNNING")
        return job


def jobs(capture: Capture) -> None:
    """Captures a job in each state that can be reached within two minutes."""
    slurm, script = capture.slurm, capture.script
    Path(script).write_text('#!/bin/bash\ntrap "" TERM\neval "${1:-while :; do sleep 1; done}"\n')
    own = ("-N1", "-w", "node1", "--gpus-per-node=2", "--time=60", "--constraint=ib&h100")
    capture.running(*own, "--exclude=node[5-6]", f"--comment={COMMENT}")
    capture.running("-N1", "-w", "node2", "--gpus-per-node=h100:1")
    late = capture.running("-N1", "-w", "node4", "--time=1")
    for code, state in ((0, "COMPLETED"), (3, "FAILED")):
        capture.wait_until(capture.submit("-w", "node3", script, f"exit {code}"), state)
    failed = capture.running("-N1", "-w", "node6", "--no-requeue")
    slurm.output_of("scontrol", "update", "NodeName=node6", "State=DOWN", "Reason=kernel panic")
    capture.wait_until(failed, "NODE_FAIL")
    capture.submit("--begin=now+3hours")
    capture.submit(f"--dependency=afterok:{failed}")
    for verb in ("hold", "uhold"):
        slurm.output_of("scontrol", verb, capture.submit("-N6"))
    capture.wait_until(late, "TIMEOUT")
    cancelled = capture.running("-N1", "-w", "node5")
    slurm.output_of("scancel", cancelled)
    capture.wait_until(cancelled, "CANCELLED")
    again = capture.running("-N1", "-w", "node3")
    slurm.output_of("scontrol", "requeuehold", again)
    capture.wait_until(again, "PENDING")
    again = capture.running("-N1", "-w", "node3")
    slurm.output_of("scontrol", "requeue", again)
    capture.wait_until(again, "PENDING")
    slurm.output_of("scontrol", "update", f"JobId={again}", "ExcNodeList=node[4-5]")
    capture.submit("-N4", "-w", "node[1-4]", "--exclusive")
    ending = capture.running("-N1", "-w", "node4")
    slurm.output_of("scancel", ending)
    capture.wait_until(ending, "COMPLETING")
    capture.capture_output("jobs.txt", *SHOW_JOBS)
    capture.capture_output("queue.txt", *QUEUE)
    capture.wait_until(ending, "CANCELLED")


def nodes(capture: Capture) -> None:
    """Captures nodes: node1 drains with a job on both GPUs, node2 has a job on one GPU, node3 is in
    maintenance, node4's slurmd was killed, node5 is drained, node6 is down."""
    slurm = capture.slurm
    slurm.output_of("scontrol", "update", "NodeName=node1", "State=DRAIN", "Reason=maintenance")
    slurm.output_of(
        "scontrol", "update", "NodeName=node5", "State=DRAIN", "Reason=ECC errors on GPU 3"
    )
    slurm.output_of(
        *("scontrol", "create", "reservation", "ReservationName=upgrade", "StartTime=now"),
        *("Duration=60", "Nodes=node3", "Users=root", "Flags=MAINT,IGNORE_JOBS"),
    )
    slurm.kill_node("node4")
    slurm.wait_for("node4 down", lambda: slurm.node_state("node4") == "down*")
    slurm.wait_for("node3", lambda: "MAINT" in slurm.output_of("scontrol", "show", "node", "node3"))
    capture.capture_output("nodes.txt", *NODES)


def refusals(capture: Capture) -> None:
    """Captures errors, first of wrong requests, then while slurmctld is down."""
    slurm, batch = capture.slurm, ("sbatch", "--parsable", "-o/dev/null", "--chdir=/tmp")
    running = slurm.output_of("squeue", "-h", "-t", "R", "-o", "%A").split()[0]
    wrong = (
        *("--partition=nowhere", "--nodes=99", "--gpus-per-node=9", "--gpus-per-node=a100:1"),
        *("--constraint=nothing", "--nodelist=nowhere", "--exclude=nowhere", "--time=soon"),
        *("--reservation=none", "--licenses=none", "--qos=none", "--segment=2", "--switches=1"),
    )
    update = ("scontrol", "update")
    capture.capture_results(
        "refusals.json",
        [
            *((*batch, one, "--wrap=true") for one in wrong),
            (*batch, "--test-only", "--nodes=1", "--wrap=true"),
            (*batch, "--test-only", "--nodes=99", "--wrap=true"),
            ("scontrol", "show", "job", "-a", "-o", UNKNOWN),
            ("scontrol", "requeue", UNKNOWN),
            (*update, f"JobId={UNKNOWN}", "ExcNodeList=node1"),
            (*update, f"JobId={running}", "ExcNodeList=node5"),
            ("scancel", UNKNOWN),
            ("squeue", "-h", "-a", "--name=nothing", "-o", SQUEUE_FORMAT),
            ("srun", f"--jobid={UNKNOWN}", "--overlap", "true"),
            ("scontrol", "show", "node", "-a", "-o", "nowhere"),
            ("scontrol", "show", "topology", "nowhere"),
            ("sbatch", "--version"),
            ("scontrol", "ping"),
        ],
    )
    slurm.stop_ctld()
    capture.capture_results(
        "down.json",
        [
            (*batch, "--wrap=true"),
            (*batch, "--test-only", "--wrap=true"),
            QUEUE,
            NODES,
            PARTITIONS,
            TOPOLOGY,
            ("scontrol", "show", "config"),
            (*SHOW_JOBS, running),
            ("scontrol", "requeue", running),
            (*update, f"JobId={running}", "ExcNodeList=node1"),
            ("scancel", running),
            ("srun", f"--jobid={running}", "--overlap", "true"),
            ("scontrol", "ping"),
        ],
    )


def blocks(into: Path) -> None:
    """Captures nodes with GPUs that have no type, in blocks of two nodes."""
    knobs = {"TB_GPU_TYPE": "", "TB_TOPOLOGY": "block"}
    with running_testbed(4, 2, knobs) as slurm:
        capture = Capture(slurm, into)
        capture.capture_output("untyped-nodes.txt", *NODES)
        capture.capture_output("topology-block.txt", *TOPOLOGY)
        asked = ("sbatch", "--test-only", "-o/dev/null", "--nodes=4", "--wrap=true")
        capture.capture_results(
            "segments.json", [(*asked, f"--segment={size}") for size in (1, 2, 3)]
        )


def topologies(into: Path) -> None:
    """Captures five topologies, each with its own partition."""
    names = ("switched", "nvlink", "round", "pod", "plain")
    partitions = "\n".join(f"PartitionName={n} Nodes=ALL State=UP Topology={n}" for n in names)
    knobs = {"TB_TOPOLOGY_YAML": TOPOLOGIES, "TB_PARTITIONS": partitions}
    with running_testbed(8, 1, knobs) as slurm:
        capture = Capture(slurm, into)
        capture.capture_output("several-partitions.txt", *PARTITIONS)
        capture.capture_results(
            "several-topologies.json", [TOPOLOGY, *((*TOPOLOGY, n) for n in names)]
        )


def main(folder: str) -> None:
    into = Path(folder)
    into.mkdir(parents=True, exist_ok=True)
    knobs = {"TB_GPU_TYPE": "h100", "TB_KILL_WAIT": "6", "TB_PARTITIONS": PARTED, "TB_EXTRA": SITE}
    with running_testbed(6, 2, knobs) as slurm:
        capture = Capture(slurm, into)
        features = "AvailableFeatures=ib,h100"
        slurm.output_of("scontrol", "update", "NodeName=node[1-2]", features)
        capture.capture_output("partitions.txt", *PARTITIONS)
        capture.capture_output("topology.txt", *TOPOLOGY)
        capture.capture_output("config.txt", "scontrol", "show", "config")
        jobs(capture)
        nodes(capture)
        refusals(capture)
    if slurm_version() >= FIRST_WITH_BLOCKS:
        blocks(into)
    if slurm_version() >= FIRST_WITH_TOPOLOGY_YAML:
        topologies(into)


if __name__ == "__main__":
    main(*sys.argv[1:])
